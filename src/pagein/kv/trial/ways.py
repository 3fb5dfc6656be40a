"""Ways to keep the KV of conversations between their turns: transformers' own caches, none at all, and the tiers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, Protocol

import torch
import transformers

from pagein.errors import EngineMissing
from pagein.kv.cache.reading import read_geometry
from pagein.kv.tiers.pool import KvPool
from pagein.kv.tiers.settings import KvSettings
from pagein.units import format_bytes


class Full(Exception):
    """The bytes that a way may keep do not hold this turn: what would be an out-of-memory error."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a turn gave."""

    tokens: list[int]
    """The whole conversation now."""
    computed: int
    """Tokens of the prompt that were not reused."""
    first_at: float | None = None
    """The clock (`perf_counter`) when the first token of the answer was there."""


class Way(Protocol):
    """How KV is kept."""

    def turn(self, user: int, tokens: list[int], new: int) -> Answer:
        """Answer a prompt; raises `Full`."""

    def finish(self, user: int) -> None:
        """Let a conversation go: it does not come back."""

    def recall(self, histories: Sequence[tuple[int, list[int]]]) -> None:
        """Take conversations over that were led before, the last one last: off the clock, as far as they are kept."""

    def told(self) -> dict[str, Any]:
        """Return what it says of itself."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a way may take."""

    memory: int | None = None
    """Bytes of KV on the device that computes; None: no bound."""
    host: int | None = None
    disk: Path | None = None
    disk_cap: int = 10 * 1024**3


class FirstToken:
    """What `generate` tells of each step: keeps when the first token came."""

    def __init__(self) -> None:
        self.at: float | None = None
        self._prompted = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, and then each token."""
        if self._prompted and self.at is None:
            self.at = perf_counter()
        self._prompted = True

    def end(self) -> None:
        """Nothing is held back."""


def generate(model: Any, tokens: list[int], new: int, cache: Any, streamer: FirstToken | None = None) -> list[int]:
    """Return the prompt and exactly so many greedy tokens more, of the decoder where there is an encoder."""
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            streamer=streamer,
        )
    answer = made[0, 1:] if model.config.is_encoder_decoder else made[0, len(tokens) :]
    return [*tokens, *(int(token) for token in answer)]


class Stock:
    """One ``DynamicCache`` a conversation, all of them kept: what does not fit the bytes is refused."""

    offloading = False

    def __init__(self, model: Any, limits: Limits) -> None:
        self._model, self._limits = model, limits
        self._caches: OrderedDict[int, Any] = OrderedDict()
        self._per_token = read_geometry(model).bytes_per_token
        self._most = 0

    def turn(self, user: int, tokens: list[int], new: int) -> Answer:
        """Go on in the conversation's cache, or in a new one."""
        first = FirstToken()
        if self._model.config.is_encoder_decoder:  # what a decoder keeps depends on the whole input: of no further use
            return Answer(generate(self._model, tokens, new, None, first), len(tokens), first.at)
        self._make_room(user, len(tokens) + new)
        cache = self._caches.pop(user, None)
        if cache is None:
            cache = transformers.DynamicCache(config=self._model.config, offloading=self.offloading)
        known = cache.get_seq_length()
        made = generate(self._model, tokens, new, cache, first)
        self._caches[user] = cache
        self._most = max(self._most, self._kept())
        return Answer(made, len(tokens) - known, first.at)

    def finish(self, user: int) -> None:
        """Drop its cache."""
        self._caches.pop(user, None)

    def recall(self, histories: Sequence[tuple[int, list[int]]]) -> None:
        """Compute the last ones that fit; what they say next costs what it would have."""
        kept: list[tuple[int, list[int]]] = []
        left = self._limits.memory
        for user, tokens in reversed(histories):
            if left is not None and len(tokens) * self._per_token > left:
                break
            left = None if left is None else left - len(tokens) * self._per_token
            kept.append((user, tokens))
        for user, tokens in reversed(kept):
            self._caches[user] = transformers.DynamicCache(config=self._model.config, offloading=self.offloading)
            generate(self._model, tokens[:-1], 1, self._caches[user])  # the last token has no KV yet

    def told(self) -> dict[str, Any]:
        """Bytes that it kept at the most, after any turn."""
        return {"most_kept_bytes": self._most}

    def close(self) -> None:
        """Drop all caches."""
        self._caches.clear()

    def _kept(self, but: int | None = None) -> int:
        return sum(_nbytes(cache) for user, cache in self._caches.items() if user != but)

    def _make_room(self, user: int, tokens: int) -> None:
        need, most = tokens * self._per_token, self._limits.memory
        if most is not None and self._kept(but=user) + need > most:
            kept = format_bytes(self._kept(but=user))
            self._caches.pop(user, None)
            raise Full(f"out of memory: {format_bytes(need)} beside {kept} of others, in {format_bytes(most)}")


class Fitting(Stock):
    """The same, with the last used ones kept as far as they fit: the others' histories are computed anew."""

    def _make_room(self, user: int, tokens: int) -> None:
        need, most = tokens * self._per_token, self._limits.memory
        while most is not None and self._caches and self._kept(but=user) + need > most:
            oldest = next((other for other in self._caches if other != user), None)
            if oldest is None:
                break
            del self._caches[oldest]
        super()._make_room(user, tokens)


class Offloaded(Stock):
    """transformers' offloaded cache: all layers but one rest in host memory. On CUDA devices only."""

    offloading = True

    def __init__(self, model: Any, limits: Limits) -> None:
        if model.device.type != "cuda":
            raise EngineMissing("transformers' offloaded cache is CUDA only", hint="run it on a machine with a GPU")
        super().__init__(model, limits)


class Recompute:
    """Keeps nothing: each turn computes its whole history."""

    def __init__(self, model: Any, limits: Limits) -> None:
        self._model = model

    def turn(self, user: int, tokens: list[int], new: int) -> Answer:
        """Compute everything."""
        first = FirstToken()
        return Answer(generate(self._model, tokens, new, None, first), len(tokens), first.at)

    def finish(self, user: int) -> None:
        """Nothing is kept."""

    def recall(self, histories: Sequence[tuple[int, list[int]]]) -> None:
        """Nothing is kept."""

    def told(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing is kept."""


class Tiered:
    """Pagein's tiers: a `TieredCache` a conversation, all of one `KvPool`."""

    def __init__(self, model: Any, limits: Limits, settings: KvSettings | None = None) -> None:
        self._model = model
        self.pool = KvPool(
            model,
            memory=limits.memory if limits.memory is not None else "1GiB",
            device=str(model.device),
            host=limits.host,
            disk=limits.disk,
            disk_cap=limits.disk_cap,
            settings=settings,
        )
        self._caches: dict[int, Any] = {}

    def turn(self, user: int, tokens: list[int], new: int) -> Answer:
        """Go on with what the tiers have of the conversation."""
        cache, first = self._caches.get(user), FirstToken()
        if cache is None:
            cache = self._caches[user] = self.pool.open(f"user-{user}")
        with cache.turn(tokens) as turn:
            both = cache.with_cross_attention() if self._model.config.is_encoder_decoder else cache
            made = generate(self._model, tokens, new, both, first)
            turn.end(made)
        return Answer(made, len(tokens) - turn.reuse.tokens, first.at)

    def recall(self, histories: Sequence[tuple[int, list[int]]]) -> None:
        """Compute all of them: each has its place in a tier."""
        for user, tokens in histories:
            self.turn(user, tokens[:-1], 1)

    def finish(self, user: int) -> None:
        """Free it in every tier."""
        cache = self._caches.pop(user, None)
        if cache is not None:
            self.pool.forget(f"user-{user}")
            cache.close()

    def told(self) -> dict[str, Any]:
        """The pool's own report."""
        return plain(self.pool.report())

    def close(self) -> None:
        """Close caches and pool."""
        for cache in self._caches.values():
            cache.close()
        self.pool.close()


WAYS: dict[str, Callable[[Any, Limits], Way]] = {
    "stock": Stock,
    "fitting": Fitting,
    "offloaded": Offloaded,
    "recompute": Recompute,
    "tiered": Tiered,
}
"""By the names that the command line of a trial knows."""


def plain(report: Any) -> dict[str, Any]:
    """Return a report as JSON-ready values."""
    from dataclasses import asdict, is_dataclass

    if is_dataclass(report) and not isinstance(report, type):
        return asdict(report)
    return dict(report)


def _nbytes(cache: Any) -> int:
    """Bytes of a stock cache's tensors, on the device that computes."""
    total = 0
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if isinstance(tensor, torch.Tensor):
                total += tensor.untyped_storage().nbytes()
    return total
