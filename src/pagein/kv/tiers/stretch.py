"""The rows of a conversation that is larger than its device: they lie below, and come up a layer at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from pagein.errors import KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.geometry import LayerShape, blocks_of
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.lanes import Landing, lane_of
from pagein.kv.tiers.spill import Spill
from pagein.memory.buffers import Buffer

CHUNK = 4 * BLOCK
"""Tokens of a piece below: [layer][token][K of all heads, V of all heads], so that a layer's rows are one read each."""
_AHEAD = 256
"""Tokens, at least, that there is room for once a conversation has become longer than anybody expected."""
_ROTATING = 2
"""Layers that take turns: one is computed with while the next one comes up."""

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True, eq=False)
class _Slot:
    """Device memory for one layer at a time."""

    flat: torch.Tensor
    buffer: Buffer | None
    layer: int = -1
    rows: int = 0
    """First rows of the layer that are here."""
    coming: Future[tuple[int, float]] | None = None
    landing: Landing | None = None


class Stretch:
    """Serves attention as blocks do, bit for bit: per head the same matrix, in a slot of one layer.

    Each new row is written through to the tier below, which always has all of them. As many layers as have room keep a
    slot of their own; the others come up before they are computed, the next while one computes. It belongs to the
    thread of its cache; a thread of its own reads ahead.
    """

    def __init__(self, books: Books, spill: Spill, layers: Sequence[LayerShape], available: Callable[[], int]) -> None:
        """``layers`` in the order of computing; ``available`` tells the bytes of the device that it may take."""
        self._books, self._spill, self._available = books, spill, available
        # Of its own: it touches no blocks, so that its copies need neither the gate nor the lock of the books, and
        # whoever holds these may wait for the reader.
        self._lane = lane_of(books.device.device)
        self._shapes = list(layers)
        self._number = {shape.index: number for number, shape in enumerate(layers)}
        self._at = [0, *accumulate(CHUNK * shape.token_bytes for shape in layers)]
        self._slots: list[_Slot] = []
        self._room = 0
        """Tokens that a slot has room for."""
        self.staged = 0
        """Bytes on the device."""
        self._reading = self._writing = torch.empty(0, dtype=torch.uint8)
        self._reader: ThreadPoolExecutor | None = None
        self._reader_id = 0

    @staticmethod
    def least(layers: Sequence[LayerShape], tokens: int) -> int:
        """Bytes of the device without which so many tokens cannot be computed: one layer's."""
        widest = max(shape.token_bytes for shape in layers)
        return (blocks_of(tokens) * BLOCK + 2 * CHUNK) * widest

    @staticmethod
    def piece_bytes(layers: Sequence[LayerShape]) -> int:
        """Bytes of a piece below."""
        return CHUNK * sum(shape.token_bytes for shape in layers)

    def moved_for(self, tokens: int) -> int:
        """Bytes that one more token moves behind so many: what comes up for it, and its own rows down."""
        fixed = self._fixed
        return sum(
            shape.token_bytes * (1 + (tokens if number >= fixed else 0)) for number, shape in enumerate(self._shapes)
        )

    # ── room ────────────────────────────────────────────────────────────────────────────────────

    def grow(self, tokens: int) -> None:
        """Have room below for so many tokens; KvFull where there is none."""
        self._spill.grow(-(-tokens // CHUNK))

    def prepare(self, end: int, expected: int = 0) -> None:
        """Have room for a pass that ends with so many tokens, here and below; KvFull where there is none."""
        self.grow(end)
        if end <= self._room:
            return
        wished = expected if expected >= end else end + max(_AHEAD, end // 8)
        try:
            self._stage(blocks_of(wished) * BLOCK)
        except KvFull:
            if wished == end:
                raise
            self._stage(blocks_of(end) * BLOCK)

    def _stage(self, room: int) -> None:
        self.rest()
        device, widest = self._books.device, max(shape.token_bytes for shape in self._shapes)
        size, beside = room * widest, 2 * CHUNK * widest
        count = max(min((self._available() - beside) // size, len(self._shapes)), 1)
        while True:
            try:
                device.set_aside(count * size + beside, f"a layer of a conversation of {room} tokens")
                break
            except KvFull:
                if count == 1:
                    raise
                count //= 2
        self.staged, self._room = count * size + beside, room
        with torch.inference_mode(False):  # what is made in it cannot be written outside of it
            self._slots = [self._slot(size) for _ in range(count)]
            self._reading, self._writing = (torch.empty(beside // 2, dtype=torch.uint8) for _ in range(2))
        self._reader = ThreadPoolExecutor(1, "pagein-kv-ahead")

    def _slot(self, size: int) -> _Slot:
        device = self._books.device.device
        if device.type != "cpu":
            return _Slot(torch.empty(size, dtype=torch.uint8, device=device), None)
        buffer = Buffer(size)
        return _Slot(torch.frombuffer(buffer.view, dtype=torch.uint8), buffer)

    def rest(self) -> None:
        """Give back what it has on the device; the next pass prepares it anew. Idempotent."""
        if threading.get_ident() != self._reader_id:  # a cache may be collected in any thread, this one too
            wait([slot.coming for slot in self._slots if slot.coming is not None])
        if self._reader is not None:
            self._reader.shutdown(wait=False, cancel_futures=True)
            self._reader = None
        for slot in self._slots:
            if slot.buffer is not None:
                slot.buffer.close()
        self._slots = []
        self._reading = self._writing = torch.empty(0, dtype=torch.uint8)
        size, self.staged, self._room = self.staged, 0, 0
        self._books.device.give_back(size)

    def close(self) -> None:
        """Give everything back, below too. Idempotent."""
        self.rest()
        self._spill.close()

    # ── layers ──────────────────────────────────────────────────────────────────────────────────

    def update(self, index: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> Pair:
        """Write new rows [1, heads, tokens, dim] of a layer behind ``start``; return all: views until it is the next.

        KvLost where those before did not come up.
        """
        number, count = self._number[index], keys.shape[2]
        shape, slot = self._shapes[number], self._slots[self._slot_of(number)]
        self._settle(slot)
        if slot.layer != number:
            slot.layer, slot.rows = number, 0
        if slot.rows < start:
            self._order(slot, start)
            self._settle(slot)
        here = self._views(slot, shape)
        for whole, states in zip(here, (keys, values), strict=True):
            whole.narrow(1, start, count).copy_(states[0])
        self.put(index, start, keys, values)
        slot.rows = start + count
        self._ahead(number, start, start + count)
        return here[0].narrow(1, 0, start + count).unsqueeze(0), here[1].narrow(1, 0, start + count).unsqueeze(0)

    def put(self, index: int, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write rows [1, heads, tokens, dim] of a layer below."""
        number, end, after = self._number[index], start + keys.shape[2], self._lane.computed()
        size = self._shapes[number].token_bytes
        for at, stop in _pieces(start, end):
            parts = [whole[0].narrow(1, at - start, stop - at) for whole in (keys, values)]
            into = self._writing[: (stop - at) * size]
            if not into.numel():  # not staged yet: what it had in blocks goes below
                into = torch.empty((stop - at) * size, dtype=torch.uint8)
            begun = time.perf_counter()
            self._lane.down(partial(_by_token, parts), into, after)
            self._spill.write(at // CHUNK, self._at[number] + at % CHUNK * size, into)
            self._count(into.numel(), time.perf_counter() - begun)

    def rows(self, index: int, first: int, end: int) -> Pair:
        """Return copies of rows of a layer: K and V, [heads, tokens, dim], in host memory."""
        number = self._number[index]
        shape, parts = self._shapes[number], []
        for at, stop in _pieces(first, end):
            flat = torch.empty((stop - at) * shape.token_bytes, dtype=torch.uint8)
            self._spill.read(at // CHUNK, self._at[number] + at % CHUNK * shape.token_bytes, flat)
            parts.append(flat)
        return _by_head(torch.cat(parts), shape)

    def _ahead(self, number: int, start: int, end: int) -> None:
        """Let the layer that is computed next come up meanwhile; the first one behind the last, for the next pass."""
        after = number + 1 if number + 1 < len(self._shapes) else 0
        slot, rows = self._slots[self._slot_of(after)], start if after else end
        if slot is self._slots[self._slot_of(number)]:
            return
        self._settle(slot)
        if not rows or (slot.layer == after and slot.rows >= rows):
            return
        if slot.layer != after:
            slot.layer, slot.rows = after, 0
        self._order(slot, rows)

    def _order(self, slot: _Slot, rows: int) -> None:
        """Let the first rows of a slot's layer come, behind what the device computes now."""
        assert self._reader is not None, "it is staged"
        slot.coming = self._reader.submit(self._bring, slot, rows, self._lane.computed())

    def _bring(self, slot: _Slot, rows: int, after: Any) -> tuple[int, float]:
        """Bring the rows that lack; returns bytes and seconds. In the reader's thread, which takes no lock."""
        self._reader_id, begun, size = threading.get_ident(), time.perf_counter(), 0
        number, shape = slot.layer, self._shapes[slot.layer]
        for at, stop in _pieces(slot.rows, rows):
            flat = self._reading[: (stop - at) * shape.token_bytes]
            self._spill.read(at // CHUNK, self._at[number] + at % CHUNK * shape.token_bytes, flat)
            self._lane.up(flat, partial(self._spread, slot, shape, at), after)
            self._lane.settle()  # its bytes are read into again
            size += flat.numel()
        slot.rows, slot.landing = rows, self._lane.landing()
        return size, time.perf_counter() - begun

    def _settle(self, slot: _Slot) -> None:
        """Wait for what is on its way to a slot; raises what went wrong."""
        coming, slot.coming = slot.coming, None
        if coming is not None:
            try:
                self._count(*coming.result())
            except BaseException:
                slot.layer, slot.rows = -1, 0
                raise
        landing, slot.landing = slot.landing, None
        if landing is not None:
            landing.wait()

    def _spread(self, slot: _Slot, shape: LayerShape, first: int, flat: torch.Tensor) -> None:
        for whole, rows in zip(self._views(slot, shape), _by_head(flat, shape), strict=True):
            whole.narrow(1, first, rows.shape[1]).copy_(rows)

    def _views(self, slot: _Slot, shape: LayerShape) -> Pair:
        """K and V of a slot: [heads, room, dim]."""
        size = shape.heads * self._room * shape.key_dim * shape.dtype.itemsize
        end = size + shape.heads * self._room * shape.value_dim * shape.dtype.itemsize
        keys = slot.flat[:size].view(shape.dtype).view(shape.heads, self._room, shape.key_dim)
        return keys, slot.flat[size:end].view(shape.dtype).view(shape.heads, self._room, shape.value_dim)

    @property
    def _fixed(self) -> int:
        """Layers, the first ones, that have a slot of their own."""
        count = len(self._slots)
        return count if count >= len(self._shapes) else max(count - _ROTATING, 0)

    def _slot_of(self, number: int) -> int:
        fixed = self._fixed
        return number if number < fixed else fixed + (number - fixed) % (len(self._slots) - fixed)

    def _count(self, size: int, seconds: float) -> None:
        with self._books.lock:
            self._books.counters.gathered.add(size, seconds)


def _pieces(first: int, end: int) -> list[tuple[int, int]]:
    """Cut a range of tokens where pieces end."""
    cuts = [first, *range((first // CHUNK + 1) * CHUNK, end, CHUNK), end]
    return list(pairwise(cuts)) if end > first else []


def _by_token(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """K and V, [heads, tokens, dim] each, as they lie below: flat uint8 of [tokens, all heads of K | those of V]."""
    return torch.cat([part.transpose(0, 1).flatten(1) for part in parts], dim=1).reshape(-1).view(torch.uint8)


def _by_head(flat: torch.Tensor, shape: LayerShape) -> Pair:
    """The same back again: views of the flat bytes."""
    rows = flat.view(shape.dtype).view(-1, shape.heads * (shape.key_dim + shape.value_dim))
    keys, values = rows.split([shape.heads * shape.key_dim, shape.heads * shape.value_dim], dim=1)
    by_head = keys.unflatten(1, (shape.heads, shape.key_dim)), values.unflatten(1, (shape.heads, shape.value_dim))
    return by_head[0].transpose(0, 1), by_head[1].transpose(0, 1)
