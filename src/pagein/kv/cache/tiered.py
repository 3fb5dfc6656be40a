"""The KV cache of one conversation, for plain `generate(..., past_key_values=cache)`."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache

from pagein.errors import BadUsage, CacheMismatch
from pagein.kv.blocks.keys import common_length
from pagein.kv.cache.batch import Batch
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.layers import PagedLayer, SlidingPagedLayer
from pagein.kv.cache.pictures import pictures_of
from pagein.kv.cache.reading import PAGED, read_geometry, stock_layers
from pagein.kv.tiers.answers import Reuse, Source, Why
from pagein.units import parse_bytes

if TYPE_CHECKING:
    from pagein.kv.tiers.pool import KvPool

Tokens: TypeAlias = "torch.Tensor | Sequence[int]"


class Keeper(Protocol):
    """Who keeps conversations beyond one cache (`KvPool`); a cache without one reuses only what it has itself."""

    def begin(self, cache: TieredCache, tokens: Sequence[int]) -> Reuse:
        """Make the cache hold the longest prefix of the tokens that there is, never all of them."""

    def end(self, cache: TieredCache, tokens: Sequence[int]) -> None:
        """Take note of what the rows stand for: the first `cache.get_seq_length()` of the tokens."""

    def abandon(self, cache: TieredCache) -> None:
        """Take note of a turn that broke off; the cache has kept what is known to be right."""

    def close_cache(self, cache: TieredCache) -> None:
        """Take note that the cache's blocks are free."""


class TieredCache(DynamicCache):  # type: ignore[misc]
    """A conversation's KV in blocks of a shared arena; drop-in for the stock cache, and exact.

    Without `begin` and `end` it is an ordinary cache: correct, never compared with any tokens. With them a next turn
    computes only what is new. Rows of a batch that is padded on the left hold the padding, as with the stock cache;
    `begin` takes one unpadded text. It belongs to one thread at a time.
    """

    def __init__(
        self,
        model: Any = None,
        *,
        memory: int | str = "256MiB",
        geometry: Geometry | None = None,
        device: DeviceTier | None = None,
        keeper: Keeper | None = None,
        tenant: str = "",
        name: str | None = None,
        expected: int = 0,
        pool: KvPool | None = None,
        disk: Path | str | None = None,
        disk_cap: int | str = "10GiB",
        host: int | str | None = None,
    ) -> None:
        """``memory``: bytes of a device tier of its own, where neither ``device`` nor ``pool`` gives one.

        ``pool`` is one to join; with a ``disk`` folder (up to ``disk_cap``), or ``host`` memory beside an accelerator,
        the cache makes a pool of its own. ``expected``: tokens to come.
        """
        self._own_pool: KvPool | None = None
        if pool is None and (disk is not None or host is not None):
            from pagein.kv.tiers.pool import KvPool  # it stands on this module

            pool = self._own_pool = KvPool(model, memory=memory, host=host, disk=disk, disk_cap=disk_cap)
        if pool is not None:
            device, keeper = pool.device, pool
        self.pictures = pool.pictures if pool is not None else pictures_of(model)
        if device is not None:
            geometry = device.geometry
        elif geometry is None:
            geometry = read_geometry(model)
        if device is None:
            device = DeviceTier(geometry, parse_bytes(memory), _device_of(model))
        self.geometry = geometry
        self.device_tier = device
        self.keeper = keeper
        self.tenant, self.name = tenant, name
        self.batch = Batch(self.device_tier, sum(len(group.layers) for group in geometry.groups), expected)
        self._prompt: list[int] | None = None
        self._last = -1
        """Of an encoder-decoder model: the layer whose K and V were written last."""
        Cache.__init__(self, layers=_layers(self.batch, geometry))
        self._finalizer = weakref.finalize(self, self.device_tier.drop, self.batch)
        self._finalizer.atexit = False
        if pool is not None:
            pool.join(self)

    # Turns
    @property
    def tokens(self) -> list[int]:
        """What the rows are known to stand for, from the first on."""
        return self.batch.tokens

    @property
    def side(self) -> list[Any]:
        """Stock layers that keep something else than K and V: right at exactly one length."""
        return [self.layers[index] for index in self.geometry.side_layers]

    @property
    def landed(self) -> Callable[[int], None] | None:
        """Called with a layer's index before its blocks are read; None where they are there."""
        return self.batch.landed

    @landed.setter
    def landed(self, wait: Callable[[int], None] | None) -> None:
        self.batch.landed = wait

    def begin(self, input_ids: Tokens) -> Reuse:
        """Begin a turn with the whole prompt; `generate` then computes only what `Reuse.tokens` leaves.

        Ids of pictures are those of any picture, so nothing from the first one on is reused; where `media_tokens` of
        each picture's digest stand in their place, it is.
        """
        tokens = tokens_of(input_ids)
        if self.batch.closed:
            raise CacheMismatch("a turn of a cache", "been closed", "a prompt")
        if tokens is None or self.geometry.has_encoder:
            self.reset()
            why = "several texts at once" if tokens is None else "what a decoder keeps depends on the encoder's input"
            kind = Why.ENCODER if self.geometry.has_encoder else Why.TOKENS
            return Reuse(0, Source.NONE, f"nothing is reused: {why}", 0 if tokens is None else len(tokens), kind=kind)
        given, tokens = tokens, self.pictures.told_apart(tokens)
        reuse = self.keeper.begin(self, tokens) if self.keeper is not None else self.hold(tokens)
        if tokens is not given:
            reuse = replace(reuse, reason=f"{reuse.reason}; its ids of pictures are those of any picture")
        self.pictures.begin(self, tokens)
        self._prompt, self.batch.lowest, self.batch.due = tokens, len(tokens), len(tokens)
        return reuse

    def hold(self, tokens: Sequence[int]) -> Reuse:
        """Keep what the cache has of a prompt, but for its last token, and let go of the rest."""
        known, prompt = len(self.tokens), len(tokens)
        self._only_first()
        if self.geometry.turns_otherwise(prompt):
            self.reset()
            words = f"{prompt} tokens are turned by other angles than fewer are"
            return Reuse(0, Source.NONE, words, prompt, kind=Why.SETTINGS)
        most = min(common_length(self.tokens, tokens), max(prompt - 1, 0))
        if self.can_hold(most):
            self.crop_to(most)
            why = f"{most} of {prompt} tokens are as before"
        elif most:
            why = f"the first {most} of {known} tokens are as before, but {self._why_not(most)}"
            self.reset()
            most = 0
        else:
            why = f"none of {known} tokens is as before"
            self.reset()
        kind = None if most and most == prompt - 1 else Why.TOKENS if known else Why.EMPTY
        return Reuse(most, Source.LIVE if most else Source.NONE, why, prompt, kind=kind)

    def can_hold(self, length: int) -> bool:
        """Tell whether the cache can be taken back to a length exactly."""
        whole = not self.side or length == self.batch.length
        return self.batch.agreed and (length == 0 or (whole and self.batch.can_crop(length)))

    def _why_not(self, length: int) -> str:
        if not self.batch.agreed:
            return "a pass over them broke off"
        if self.side:
            return f"the recurrent state stands for exactly {self.batch.length}"
        return f"the window has dropped what {length} tokens would look at"

    def crop_to(self, length: int) -> None:
        """Take the cache back to a length (`can_hold`)."""
        if length == 0:
            self.reset()
        elif length < self.batch.length:
            self.batch.crop(length)

    def end(self, output_ids: Tokens) -> None:
        """End a turn: prompt and answer, as `generate` returns them. The last token may have no KV yet.

        After several rows (beams, several answers) only the prompt is kept. CacheMismatch, and nothing of the turn is
        kept, where the tokens do not begin with its prompt.
        """
        prompt, self._prompt, self.batch.due = self._prompt, None, 0
        tokens = tokens_of(output_ids)
        if tokens is None or len(self.batch.rows) > 1:
            self._only_first()
            tokens = prompt or []
        tokens = self.pictures.told_apart(tokens, prompt or ())
        if prompt and tokens[: len(prompt)] != prompt:
            same = common_length(prompt, tokens)
            self.reset()
            self.pictures.abandon(self)
            if self.keeper is not None:
                self.keeper.abandon(self)
            raise CacheMismatch(f"token {same} of a turn", prompt[same], tokens[same : same + 1])
        if prompt is not None:
            self.pictures.end(self, prompt)
        if not self.can_hold(min(len(tokens), self.batch.length)):
            self.reset()
        self.crop_to(min(len(tokens), self.batch.length))
        self.batch.tokens[:] = tokens[: self.batch.length]
        if self.geometry.turns_otherwise(len(tokens)):
            self.reset()
        self.batch.settle()
        if self.keeper is not None:
            self.keeper.end(self, tokens)

    def _only_first(self) -> None:
        """Keep one of several rows: they have their known tokens in common."""
        if len(self.batch.rows) > 1 and self.side:
            self.reset()
        elif len(self.batch.rows) > 1:
            self.batch.select([0])

    def abandon(self) -> None:
        """End a turn that was called off: what is known to be right stays, all else is free at once. Idempotent."""
        prompt, self._prompt, self.batch.due = self._prompt, None, 0
        if prompt is None:
            return
        self.pictures.abandon(self)
        if self.batch.agreed:
            self._only_first()
            self.batch.tokens[:] = prompt[: min(self.batch.length, self.batch.lowest)]
        # A pass may have broken off behind a recurrent layer: what its state stands for nobody knows then.
        if self.side or self.geometry.turns_otherwise(len(prompt)) or not self.batch.take_back(len(self.batch.tokens)):
            self.reset()
        self.batch.settle()
        if self.keeper is not None:
            self.keeper.abandon(self)

    @contextmanager
    def turn(self, input_ids: Tokens) -> Iterator[Turn]:
        """Begin a turn, and abandon it where the block ends without `Turn.end`."""
        turn = Turn(self, self.begin(input_ids))
        try:
            yield turn
        finally:
            self.abandon()

    # What transformers asks of a cache
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new rows of a layer; return all that attention looks at."""
        found: tuple[torch.Tensor, torch.Tensor] = self.layers[layer_idx].update(
            key_states, value_states, *args, **kwargs
        )
        if self.geometry.has_encoder and len(self.layers) > 1:
            if layer_idx == self._last:  # its cross-attention: it would attend to one row of both, and be wrong
                self.reset()
                raise BadUsage(
                    "a cache alone is not what an encoder-decoder model takes: its cross-attention wrote into it, too",
                    hint="give generate cache.with_cross_attention()",
                )
            self._last = layer_idx
        return found

    def reset(self) -> None:
        """Forget everything; all blocks are free at once."""
        self.batch.release()
        self._last = -1
        for index in self.geometry.side_layers:  # stock ones keep their memory, some their flags
            self.layers[index] = stock_layers(self.geometry)[index]

    def fork(self) -> TieredCache:
        """Return a cache with the same tokens that shares all blocks; whoever goes on copies what it writes into."""
        other = TieredCache(
            device=self.device_tier, keeper=self.keeper, tenant=self.tenant, expected=self.batch.expected
        )
        other.pictures = self.pictures
        self.pictures.share(self, other)
        self.batch.arrive()
        with self.device_tier.lock:  # between two turns its blocks may leave in another thread
            other.batch.become(self.batch.fork())
            for index in self.geometry.side_layers:
                other.layers[index] = copy.deepcopy(self.layers[index])
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        return self.fork()

    def with_cross_attention(self) -> EncoderDecoderCache:
        """Return what an encoder-decoder model takes: this for itself, and a stock cache for the encoder's states."""
        return EncoderDecoderCache(self, DynamicCache(config=self.geometry.config))

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that the cache holds; shared ones count in full."""
        return sum(len(chain.blocks) * chain.group.block_bytes for row in self.batch.rows for chain in row.chains)

    def close(self) -> None:
        """Free all blocks; the cache cannot be used any more. Idempotent."""
        if self.batch.closed:
            return
        if self._own_pool is not None:
            self._own_pool.flush()
        self.reset()
        self.pictures.abandon(self)
        self.batch.closed = True
        if self.keeper is not None:
            self.keeper.close_cache(self)
            if self._own_pool is not None:
                self._own_pool.close()
        else:
            self.device_tier.shed()


class Turn:
    """A turn in progress."""

    def __init__(self, cache: TieredCache, reuse: Reuse) -> None:
        self.cache, self.reuse = cache, reuse

    def end(self, output_ids: Tokens) -> None:
        """End it: prompt and answer (`TieredCache.end`)."""
        self.cache.end(output_ids)


def tokens_of(ids: Tokens) -> list[int] | None:
    """Return the tokens of one text; None for several."""
    if not isinstance(ids, torch.Tensor):
        return list(ids)
    if ids.dim() == 1:
        return [int(one) for one in ids.tolist()]
    return [int(one) for one in ids[0].tolist()] if ids.shape[0] == 1 else None


def _layers(batch: Batch, geometry: Geometry) -> list[Any]:
    """Stock layers, and paged ones in place of those that groups have."""
    layers = stock_layers(geometry)
    slot = 0
    for group, one in enumerate(geometry.groups):
        kind = PagedLayer if one.window is None else SlidingPagedLayer
        for place, shape in enumerate(one.layers):
            assert type(layers[shape.index]) in PAGED, shape
            layers[shape.index] = kind(batch, shape, group, place, slot)
            slot += 1
    return layers


def _device_of(model: Any) -> torch.device:
    return torch.device("cpu") if model is None else torch.device(model.device)
