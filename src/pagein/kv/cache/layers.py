"""Cache layers for transformers whose K and V lie in blocks: new rows are written in place, the old are not copied.

The layers of one cache share its `Batch`: what concerns rows (beams, cropping, reset) is done once, by the first one.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from pagein.errors import CacheMismatch
from pagein.kv.cache.batch import Batch, Placement
from pagein.kv.cache.geometry import LayerShape

Pair = tuple[torch.Tensor, torch.Tensor]

CROPS_TO_LENGTH = "max_length" in signature(DynamicLayer.crop).parameters
"""Up to transformers 5.15 `crop(n)` says what is left, 0 included; since then only `crop(-n)`, what is removed."""


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """Attention over all tokens.

    For one row of consecutive blocks `update` returns views of the arena, good until the next pass over this cache; for
    several rows, or scattered blocks, it returns a fresh tensor, as the stock layer does.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, batch: Batch, shape: LayerShape, group: int, place: int, slot: int) -> None:
        """``group``, ``place``: where its blocks are; ``slot``: among the paged layers, 0 acts for all."""
        # Not super().__init__(): `keys` and `values` are questions to the blocks here, not attributes.
        self.shape = shape
        self.dtype = shape.dtype
        self.device = batch.device.device
        self._batch = batch
        self._lengths = batch.lengths
        self._places = batch.places
        self._arena = batch.device.arenas[group]
        self._group, self._place, self._slot = group, place, slot
        self._seen: Placement | None = None
        self._run_keys: torch.Tensor | None = None
        self._run_values: torch.Tensor | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Write new rows [rows, heads, tokens, dim] and return those that attention looks at, itself included."""
        start, end = self._take_in(key_states, value_states)
        keys, values = self._run_keys, self._run_values
        if keys is None or values is None:
            if self._batch.stretch is not None:
                return self._batch.stretch.update(self.shape.index, start, key_states, value_states)
            return self._scattered(key_states, value_states, start, end)
        keys.narrow(2, start, end - start).copy_(key_states)
        values.narrow(2, start, end - start).copy_(value_states)
        return keys.narrow(2, 0, end), values.narrow(2, 0, end)

    def _take_in(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[int, int]:
        """Have room for new rows, and what was there before, and know where; returns the tokens before and after."""
        start = self._lengths[self._slot]
        end = start + key_states.size(2)
        batch = self._batch
        if end > batch.length:
            batch.advance(key_states.size(0), end)
        if batch.landed is not None:
            batch.landed(self.shape.index)
        if self._places[self._group] is not self._seen or self._seen is None:
            self._look(key_states, value_states)
        self._lengths[self._slot] = end
        return start, end

    def _look(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See where the blocks are now, and that what comes is what the cache was made for."""
        shape = self.shape
        for name, states, dim in (("K", key_states, shape.key_dim), ("V", value_states, shape.value_dim)):
            want = (len(self._batch.rows), shape.heads, dim, shape.dtype)
            got = (states.shape[0], states.shape[1], states.shape[3], states.dtype)
            if want != got:
                raise CacheMismatch(f"{name} of layer {shape.index} (rows, heads, dim, dtype)", want, got)
        self._seen = seen = self._batch.placement(self._group)
        if seen.first is None:
            self._run_keys = self._run_values = None
        else:
            self._run_keys = self._arena.run_keys(self._place, seen.first)
            self._run_values = self._arena.run_values(self._place, seen.first)

    def _scattered(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int, end: int) -> Pair:
        self._write(key_states, value_states, start, end)
        return self._gather(0, end)

    def _write(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int, end: int) -> None:
        """Write rows for the tokens from start to end where they belong."""
        seen = self._seen
        assert seen is not None
        if end - start == 1 and seen.table is not None:
            self._arena.scatter(self._place, seen.positions(start), key_states, value_states)
            return
        keys, values = self._arena.keys[self._place], self._arena.values[self._place]
        for row, at, place, size in seen.pieces(start, end):
            keys.narrow(1, place, size).copy_(key_states[row].narrow(1, at, size))
            values.narrow(1, place, size).copy_(value_states[row].narrow(1, at, size))

    def _gather(self, begin: int, end: int) -> Pair:
        """Return K and V of the tokens from begin to end: [rows, heads, tokens, dim]."""
        seen = self._seen
        assert seen is not None
        if seen.first is not None:
            whole = (self._arena.run_keys(self._place, seen.first), self._arena.run_values(self._place, seen.first))
        else:
            assert seen.table is not None
            whole = self._arena.gather(self._place, seen.table, len(self._batch.rows))
        at, count = begin - seen.origin, end - begin
        return whole[0].narrow(2, at, count), whole[1].narrow(2, at, count)

    def _kept(self) -> Pair:
        """Copies of what the stock layer would hold now."""
        length = self._lengths[self._slot]
        if self._batch.stretch is not None and not self.is_sliding:
            keys, values = self._batch.stretch.rows(self.shape.index, 0, length)
            return keys.unsqueeze(0), values.unsqueeze(0)
        self._seen = self._batch.placement(self._group)
        self._run_keys = self._run_values = None
        self._seen, pair = None, self._gather(self._first_kept(length), length)
        return pair[0].clone(), pair[1].clone()

    def _first_kept(self, length: int) -> int:
        return 0

    @property
    def keys(self) -> torch.Tensor | None:
        """A copy of K [rows, heads, tokens, dim] as the stock layer holds it; None before the first token."""
        return self._kept()[0] if self.is_initialized else None

    @property
    def values(self) -> torch.Tensor | None:
        """A copy of V [rows, heads, tokens, dim] as the stock layer holds it; None before the first token."""
        return self._kept()[1] if self.is_initialized else None

    @property
    def is_initialized(self) -> bool:
        """True once there are tokens."""
        return self._lengths[self._slot] > 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: the blocks are there."""

    def get_seq_length(self) -> int:
        """Tokens that were put in."""
        return self._lengths[self._slot]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns for so many new tokens."""
        return self._lengths[self._slot] + query_length, 0

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_max_cache_shape(self) -> int:
        """The same, as it was called up to transformers 5.18."""
        return self.get_max_length()

    def offload(self) -> None:
        """Nothing: tiers are moved by blocks."""

    def prefetch(self) -> None:
        """Nothing: tiers are moved by blocks."""

    def reset(self) -> None:
        """Free all blocks."""
        if self._slot == 0:
            self._batch.release()

    def crop(self, tokens: int) -> None:
        """Remove ``-tokens`` of the last ones; a positive number is the length that is left (0: up to 5.15 only)."""
        if self._slot == 0:
            self._batch.crop(length_after(self._batch.length, tokens))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Let row i be what row ``beam_idx[i]`` was: tables change, no KV moves."""
        if self._slot == 0 and self._batch.length:
            self._batch.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Make each row several, which share blocks until they differ."""
        if self._slot == 0 and self._batch.length:
            self._batch.repeat(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows only."""
        if self._slot == 0 and self._batch.length:
            self._batch.select(torch.arange(len(self._batch.rows))[indices.cpu()].tolist())


class SlidingPagedLayer(PagedLayer):
    """Attention over a window: what has left it is free at once, but for one block to go back into."""

    is_sliding = True

    def __init__(self, batch: Batch, shape: LayerShape, group: int, place: int, slot: int) -> None:
        assert shape.window is not None
        super().__init__(batch, shape, group, place, slot)
        self.sliding_window = shape.window
        self._sliding_window_tensor = torch.tensor(shape.window, dtype=torch.long)

    @property
    def cumulative_length(self) -> int:
        """Tokens that were put in, those that left the window included."""
        return self._lengths[self._slot]

    @property
    def record_past(self) -> bool:
        """True while nothing leaves before the next `crop`; the layers of a cache record together."""
        return self._batch.recording

    @record_past.setter
    def record_past(self, record: bool) -> None:
        self._batch.recording = record

    def activate_past_recording(self) -> None:
        """Keep all from now on until `crop`, which can then take any of it back."""
        self._batch.recording = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> Pair:
        """Write new rows and return the window - 1 tokens before them, and them: [rows, heads, tokens, dim]."""
        start, end = self._take_in(key_states, value_states)
        seen, keys, values = self._seen, self._run_keys, self._run_values
        begin = self._first_kept(start)
        assert seen is not None
        if begin < seen.origin:
            return self._jumped(key_states, value_states, start, end)
        if keys is None or values is None:
            self._write(key_states, value_states, start, end)
            return self._gather(begin, end)
        at, first = start - seen.origin, begin - seen.origin
        keys.narrow(2, at, end - start).copy_(key_states)
        values.narrow(2, at, end - start).copy_(value_states)
        return keys.narrow(2, first, end - begin), values.narrow(2, first, end - begin)

    def _jumped(self, key_states: torch.Tensor, value_states: torch.Tensor, start: int, end: int) -> Pair:
        """Write only what stays of a prompt longer than the window; return all of it, as the stock layer does."""
        seen = self._seen
        assert seen is not None
        skipped = max(seen.origin - start, 0)
        self._write(key_states[:, :, skipped:], value_states[:, :, skipped:], start + skipped, end)
        if not start:
            return key_states.contiguous(), value_states.contiguous()
        before = self._retired(self._first_kept(start), start)
        return torch.cat([before[0], key_states], dim=-2), torch.cat([before[1], value_states], dim=-2)

    def _retired(self, begin: int, end: int) -> Pair:
        """Return K and V of tokens whose blocks go after this pass."""
        chains = [row.chains[self._group] for row in self._batch.rows]
        table = self._arena.table([chain.retired for chain in chains])
        keys, values = self._arena.gather(self._place, table, len(chains))
        at = begin - chains[0].retired_start
        return keys.narrow(2, at, end - begin), values.narrow(2, at, end - begin)

    def _first_kept(self, length: int) -> int:
        return max(length - self.sliding_window + 1, 0)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what `update` returns for so many new tokens."""
        first = self._first_kept(self._lengths[self._slot])
        return self._lengths[self._slot] - first + query_length, first

    def get_max_length(self) -> int:
        """The window."""
        return self.sliding_window


def length_after(length: int, crop: int) -> int:
    """Tokens that are left of ``length`` by `crop(crop)`."""
    if crop < 0 or not (crop or CROPS_TO_LENGTH):
        return max(length + crop, 0)
    return min(crop, length)
