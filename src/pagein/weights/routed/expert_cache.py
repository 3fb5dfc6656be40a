"""Routed experts in memory: each matrix of an expert is read when a token is sent to it, and stays while there is room.

The least recently used matrix leaves. Which experts a block needs is known before it computes with the first one, so
that all missing ones are read at once, ahead of what the ring reads; where a prompt needs more than there is room for,
they pass through in the order in which they are used. No buffer is allocated after `Pool.open`. One thread uses a pool.
The cache of a device with memory of its own is there; the host has only what is on its way.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import torch

from pagein.memory.buffers import Buffer
from pagein.weights.reading.layout import PAGE, lay_out
from pagein.weights.reading.reader import Extent, Reader, Reading
from pagein.weights.reading.sources import Piece, Source

LEAST_SLOTS = 2
"""One matrix is computed with while the next one is read."""
STAGES = 4
"""Matrices that can be on their way at once where they are put together after they were read."""


@dataclass(frozen=True, slots=True)
class Share:
    """One expert's part of a tensor: what is read, and where in it the matrix lies."""

    extents: tuple[Extent, ...]
    read_bytes: int
    dtype: torch.dtype
    """As stored."""
    begin: int | None
    """Byte of what was read where the matrix begins; None where it has to be put together."""
    pieces: tuple[tuple[int, int, int], ...]
    """Byte of what was read, bytes, byte of the matrix as stored; one piece where `begin` says where it lies."""


def shares_of(source: Source, experts: int, dtype: torch.dtype) -> list[Share]:
    """Divide a tensor [experts, …] by its first dimension; ``dtype`` is what it is computed in."""
    each = source.nbytes // experts
    parts: list[list[Piece]] = [[] for _ in range(experts)]
    for piece in source.pieces:
        for expert in range(piece.into // each, -(-(piece.into + piece.nbytes) // each)):
            first, last = max(expert * each, piece.into), min((expert + 1) * each, piece.into + piece.nbytes)
            begin = piece.tensor.offset + piece.start + first - piece.into
            name = f"{piece.tensor.file} {begin}"
            stored = replace(piece.tensor, name=name, offset=begin, nbytes=last - first, shape=(last - first,))
            parts[expert].append(Piece(stored, 0, last - first, first - expert * each))
    return [_share(pieces, source.dtype, dtype) for pieces in parts]


def _share(pieces: list[Piece], stored: torch.dtype, computed: torch.dtype) -> Share:
    layout = lay_out([piece.tensor for piece in pieces], gap=0)
    places = [layout.places[piece.tensor.name] for piece in pieces]
    begin = places[0]
    follow = all(place == begin + piece.into for place, piece in zip(places, pieces, strict=True))
    if follow and stored == computed and begin % computed.itemsize == 0:
        whole = ((begin, sum(piece.nbytes for piece in pieces), 0),)
        return Share(layout.extents, layout.nbytes, stored, begin, whole)
    moves = tuple((place, piece.nbytes, piece.into) for place, piece in zip(places, pieces, strict=True))
    return Share(layout.extents, layout.nbytes, stored, None, moves)


@dataclass(slots=True)
class PoolCounts:
    """What was asked of a pool since the start."""

    uses: int = 0
    """Times a matrix was asked for."""
    hits: int = 0
    """Times it was there."""
    nbytes: int = 0
    """Read from the disk."""
    waited: float = 0.0
    """Seconds that the computation stood still for a read."""


@dataclass(slots=True)
class _Entry:
    """A matrix that is in a slot, or on its way there."""

    slot: int
    reading: Reading | None = None
    stage: int | None = None
    matrix: torch.Tensor | None = None


class Pool:
    """Slots for the matrices of one shape of all blocks: ``shares[block][expert]``."""

    def __init__(
        self,
        shares: Sequence[Sequence[Share]],
        shape: torch.Size,
        dtype: torch.dtype,
        active: int,
        apart: torch.device | None = None,
    ) -> None:
        """``apart``: the device, where it has memory of its own that matrices are copied to."""
        self.shares, self.shape, self.dtype = shares, shape, dtype
        self.counts = PoolCounts()
        every = [share for block in shares for share in block]
        self.most = len(every)
        """Slots that hold everything."""
        self.least = min(self.most, max(LEAST_SLOTS, active))
        """Slots that a token needs in one block."""
        size = -(-shape.numel() * dtype.itemsize // PAGE) * PAGE
        self._apart = apart
        self.slot_bytes = max(size if self._lands_beside(share) else share.read_bytes for share in every)
        self._stage_bytes = max((share.read_bytes for share in every if self._lands_beside(share)), default=0)
        self._stages = min(self.least, STAGES) if self._stage_bytes else 0
        self._entries: list[OrderedDict[int, _Entry]] = [OrderedDict() for _ in shares]
        """Of each block by expert, the least recently used one first."""
        self._free: list[int] = []
        self._free_stages: list[int] = []
        self._block = 0
        self._ahead: deque[int] = deque()
        self._wanted: set[int] = set()
        """Experts of the block at hand that are still to be taken; those in `_ahead` were not begun to read."""
        self._used: int | None = None
        self.slots = 0
        self._buffer: Buffer | None = None
        self._flat = self._stage_flat = torch.empty(0, dtype=torch.uint8)
        self._stage_buffer: Buffer | None = None

    @property
    def fixed_bytes(self) -> int:
        """Bytes beside the slots: where matrices land that are put together."""
        return 0 if self._apart is not None else self._stages * self._stage_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory where the slots are elsewhere."""
        return 0 if self._apart is None else self._stages * self._stage_bytes

    def _lands_beside(self, share: Share) -> bool:
        """Whether a matrix is read into a stage and moved to its slot from there."""
        return share.begin is None or self._apart is not None

    def open(self, reader: Reader, slots: int) -> None:
        """Make room for so many matrices; what was there is gone."""
        assert self.least <= slots <= self.most, (slots, self.least, self.most)
        self.close()
        self._reader, self.slots = reader, slots
        with torch.inference_mode(False):  # made in it they could not be written to outside of it
            if self._apart is None:
                self._buffer = Buffer(slots * self.slot_bytes)
                self._flat = torch.frombuffer(self._buffer.view, dtype=torch.uint8)
            else:
                self._flat = torch.empty(slots * self.slot_bytes, dtype=torch.uint8, device=self._apart)
            self._free = list(reversed(range(slots)))
            if self._stages:
                self._stage_buffer = Buffer(self._stages * self._stage_bytes)
                self._stage_flat = torch.frombuffer(self._stage_buffer.view, dtype=torch.uint8)
                self._free_stages = list(range(self._stages))

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        for block, entries in enumerate(self._entries):
            for expert in list(entries):
                self._drop(block, expert)
        for buffer in (self._buffer, self._stage_buffer):
            if buffer is not None:
                buffer.close()
        self._buffer = self._stage_buffer = None
        self._flat = self._stage_flat = torch.empty(0, dtype=torch.uint8)
        self._free, self._free_stages, self.slots = [], [], 0
        self._turn_to(0)

    def fill(self) -> None:
        """Read everything; there has to be room for it."""
        assert self.slots == self.most
        counts, self.counts = self.counts, PoolCounts()
        for block, shares in enumerate(self.shares):
            self.fetch(block, range(len(shares)))
            for expert in range(len(shares)):
                self.take(block, expert)
        self.counts = counts

    def fetch(self, block: int, experts: Iterable[int]) -> None:
        """Begin to read what is missing of these, in the order in which they will be taken, as far as there is room."""
        self._turn_to(block)
        self._ahead.extend(experts)
        self._wanted.update(self._ahead)
        for expert in self._ahead:
            self._count(expert)
            if expert in self._entries[block]:
                self._entries[block].move_to_end(expert)
        self._read_ahead()

    def take(self, block: int, expert: int) -> torch.Tensor:
        """Return a matrix on the device, waiting for its read; it stays until the next one is taken.

        Raises WeightsUnreadable. On an accelerator the kernels that use it may still be queued when the next one takes
        its slot: they come before that one's copy.
        """
        if block != self._block:
            self._turn_to(block)
        if expert in self._wanted:
            self._wanted.discard(expert)
        else:
            self._count(expert)
        self._used = expert
        entries = self._entries[block]
        while expert not in entries:
            if not self._begin(expert):
                self._make_way()
        entries.move_to_end(expert)
        matrix = self._settle(expert)
        self._read_ahead()
        return matrix

    def _turn_to(self, block: int) -> None:
        self._block, self._used = block, None
        self._ahead.clear()
        self._wanted.clear()

    def _count(self, expert: int) -> None:
        self.counts.uses += 1
        self.counts.hits += expert in self._entries[self._block]

    def _read_ahead(self) -> None:
        while self._ahead:
            expert = self._ahead[0]
            if expert in self._wanted and expert not in self._entries[self._block] and not self._begin(expert):
                return
            self._ahead.popleft()

    def _begin(self, expert: int) -> bool:
        """Begin to read a matrix of the block at hand; False where there is no room for it now."""
        share = self.shares[self._block][expert]
        beside = self._lands_beside(share)
        if beside and not self._free_stages:
            return False
        if not self._free and not self._evict():
            return False
        entry = self._entries[self._block][expert] = _Entry(self._free.pop())
        into, buffer = entry.slot * self.slot_bytes, self._buffer
        if beside:
            entry.stage = self._free_stages.pop()
            into, buffer = entry.stage * self._stage_bytes, self._stage_buffer
        assert buffer is not None, "the pool is closed"
        extents = [replace(extent, into=into + extent.into) for extent in share.extents]
        entry.reading = self._reader.read(extents, buffer, urgent=True)
        self.counts.nbytes += share.read_bytes
        return True

    def _evict(self) -> bool:
        """Let the block that has most give up what it did not use for longest; False where all are wanted.

        Least recently used over all blocks would hit nothing in a cache that is smaller than what one token uses, as
        blocks come round in a cycle. In simulations this is never worse and there as good as what the cache can hold.
        """
        mine = self._entries[self._block]
        held = [len(entries) for entries in self._entries]
        held[self._block] = sum(expert not in self._wanted and expert != self._used for expert in mine)
        block = max(range(len(held)), key=held.__getitem__)
        if not held[block]:
            return False
        if block == self._block:
            self._drop(block, next(one for one in mine if one not in self._wanted and one != self._used))
        else:
            self._drop(block, next(iter(self._entries[block])))
        return True

    def _make_way(self) -> None:
        """Free a slot and a stage although all are wanted: by what is on its way first, else by what is used last."""
        mine = self._entries[self._block]
        landing = next((expert for expert, entry in mine.items() if entry.stage is not None), None)
        if landing is not None and not self._free_stages:
            self._settle(landing)
        else:
            self._drop(self._block, next(expert for expert in reversed(mine) if expert != self._used))

    def _settle(self, expert: int) -> torch.Tensor:
        """Wait until a matrix of the block at hand is there, and put it together where it needs that."""
        entry = self._entries[self._block][expert]
        if entry.matrix is not None:
            return entry.matrix
        assert entry.reading is not None
        begin = perf_counter()
        try:
            entry.reading.wait()
        except BaseException:
            self._drop(self._block, expert)
            raise
        entry.reading = None
        self.counts.waited += perf_counter() - begin
        share, at = self.shares[self._block][expert], entry.slot * self.slot_bytes
        at += 0 if entry.stage is not None else share.begin or 0
        flat = self._flat[at : at + self.shape.numel() * self.dtype.itemsize]
        entry.matrix = flat.view(self.dtype).view(self.shape)
        if entry.stage is not None:
            self._put_together(share, entry.stage, entry.matrix)
            self._free_stages.append(entry.stage)
            entry.stage = None
        return entry.matrix

    def _put_together(self, share: Share, stage: int, matrix: torch.Tensor) -> None:
        size, target = share.dtype.itemsize, matrix.view(-1)
        for place, nbytes, into in share.pieces:
            begin = stage * self._stage_bytes + place
            stored = self._stage_flat[begin : begin + nbytes]
            if begin % size:
                stored = stored.clone()
            target[into // size : (into + nbytes) // size].copy_(stored.view(share.dtype))

    def _drop(self, block: int, expert: int) -> None:
        entry = self._entries[block].pop(expert)
        if entry.reading is not None:
            self._reader.cancel(entry.reading)
        if entry.stage is not None:
            self._free_stages.append(entry.stage)
        self._free.append(entry.slot)


def divide(pools: Sequence[Pool], nbytes: int) -> Iterator[int]:
    """Yield each pool's slots, so that together they take at most so many bytes: the same share of each pool."""
    spare = nbytes - sum(pool.fixed_bytes + pool.least * pool.slot_bytes for pool in pools)
    wished = sum((pool.most - pool.least) * pool.slot_bytes for pool in pools)
    assert spare >= 0, (nbytes, spare)
    for pool in pools:
        more = pool.most - pool.least
        yield pool.least + (more if spare >= wished else more * spare // wished)
