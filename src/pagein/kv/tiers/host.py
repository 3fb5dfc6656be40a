"""The middle tier beside an accelerator: blocks in host memory, page-locked as far as that is allowed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from pagein.memory.buffers import Buffer

SEGMENT = 64 * 1024**2
"""Bytes that are taken from the machine at a time: locking pages is slow, so that it is not done for each block."""
_SHARES = 16

Lock = Callable[[torch.Tensor], "Callable[[], None] | None"]
"""Page-locks a flat tensor; returns what unlocks it, or None where that is refused."""


@dataclass(slots=True)
class _Segment:
    size: int
    """Bytes of a slot."""
    buffer: Buffer
    flat: Any
    unlock: Callable[[], None] | None
    free: list[int] = field(default_factory=list)
    slots: int = 0


class HostTier:
    """Slots of the sizes that are asked for, within a cap that is checked before. Not thread-safe: its pool has a lock.

    Memory comes and goes in segments, each of slots of one size; an empty one is given back at once.
    """

    def __init__(self, cap: int, lock: Lock | None = None, pinned_cap: int | None = None) -> None:
        self.cap, self.used, self.peak = cap, 0, 0
        self.taken = 0
        """Bytes that the machine gave: those in use, and the free slots between them."""
        self.pinned = 0
        self._lock, self._pinned_cap = lock, cap if pinned_cap is None else pinned_cap
        self._segments: dict[int, _Segment] = {}
        self._slots: dict[int, tuple[int, int]] = {}
        self._next = 0

    def put(self, size: int) -> int | None:
        """Return the handle of a new slot of ``size`` bytes; None where the cap forbids it."""
        number = next((n for n, one in self._segments.items() if one.size == size and one.free), None)
        if number is None:
            number = self._grow(size)
        if number is None:
            return None
        handle, self._next = self._next, self._next + 1
        self._slots[handle] = (number, self._segments[number].free.pop())
        self.used += size
        self.peak = max(self.peak, self.used)
        return handle

    def view(self, handle: int) -> Any:
        """Return a slot's bytes, writable, as a flat uint8 tensor."""
        number, slot = self._slots[handle]
        segment = self._segments[number]
        return segment.flat[slot * segment.size : (slot + 1) * segment.size]

    def drop(self, handle: int) -> None:
        """Free a slot; no copy may be reading or writing it."""
        number, slot = self._slots.pop(handle)
        segment = self._segments[number]
        segment.free.append(slot)
        self.used -= segment.size
        if len(segment.free) == segment.slots:
            self._give_back(number)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._slots.clear()
        for number in list(self._segments):
            self._give_back(number)
        self.used = 0

    def __len__(self) -> int:
        return len(self._slots)

    def _grow(self, size: int) -> int | None:
        # No segment takes more than a share of the cap: there are slots of several sizes.
        slots = min(max(min(SEGMENT, self.cap // _SHARES) // size, 1), (self.cap - self.taken) // size)
        if slots < 1:
            return None
        buffer = Buffer(slots * size)
        with torch.inference_mode(False):  # what is made within a pass could not be written outside of one
            flat = torch.frombuffer(buffer.view, dtype=torch.uint8)
        unlock = None
        if self._lock is not None and self.pinned + slots * size <= self._pinned_cap:
            unlock = self._lock(flat)
            self.pinned += slots * size if unlock is not None else 0
        self.taken += slots * size
        number, self._next = self._next, self._next + 1
        self._segments[number] = _Segment(size, buffer, flat, unlock, list(range(slots - 1, -1, -1)), slots)
        return number

    def _give_back(self, number: int) -> None:
        segment = self._segments.pop(number)
        if segment.unlock is not None:
            segment.unlock()
            self.pinned -= segment.slots * segment.size
        segment.buffer.close()
        self.taken -= segment.slots * segment.size
