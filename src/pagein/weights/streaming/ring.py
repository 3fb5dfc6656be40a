"""The ring: a few buffers that the streamed units pass through, read ahead of the computation.

Units are asked for in running order, pass after pass, so what comes next is known: as soon as a buffer is free the next
unit is read into it, across the end of a pass too (the first units of the next token are read while the last one is
sampled). A unit that is asked for out of turn is read at once and the order goes on from there. One thread uses a ring.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from pagein.memory.buffers import Buffer
from pagein.weights.reading.layout import Layout
from pagein.weights.reading.reader import Reader, Reading


@dataclass(slots=True)
class Slot:
    """One buffer of the ring."""

    index: int
    buffer: Buffer
    unit: int = -1
    reading: Reading | None = None


@dataclass(slots=True)
class RingCounts:
    """What passed through since the start."""

    units: int = 0
    nbytes: int = 0
    waited: float = 0.0
    """Seconds that the computation stood still for a read."""
    turns: int = 0
    """Units that were asked for out of turn."""


class Ring:
    """Buffers, and the order in which units are read into them."""

    def __init__(self, reader: Reader, layouts: Sequence[Layout], follows: Sequence[int], slots: int, slot_bytes: int):
        assert slots >= 2, slots
        assert all(layout.nbytes <= slot_bytes for layout in layouts), slot_bytes
        self.layouts = layouts
        self.counts = RingCounts()
        self._reader = reader
        self._follows = follows
        self.slots = [Slot(index, Buffer(slot_bytes)) for index in range(slots)]
        self._free = list(self.slots)
        self._ahead: deque[Slot] = deque()
        self._used: Slot | None = None
        self._next = 0

    @property
    def used(self) -> Slot | None:
        """The slot that is computed from."""
        return self._used

    @property
    def expected(self) -> int:
        """The unit that the order says is asked for next."""
        return self._ahead[0].unit if self._ahead else self._next

    def read_ahead(self) -> None:
        """Begin to read whatever a free buffer is there for."""
        while self._free:
            slot = self._free.pop()
            slot.unit = self._next
            slot.reading = self._reader.read(self.layouts[slot.unit].extents, slot.buffer)
            self._ahead.append(slot)
            self._next = self._follows[slot.unit]

    def acquire(self, unit: int) -> Slot:
        """Return the slot that holds a unit, waiting for its read; it stays until `release`.

        Raises WeightsUnreadable where the file cannot be read.
        """
        assert self._used is None, "one unit is computed at a time"
        self._reader.check_process()
        if len(self._free) + len(self._ahead) < len(self.slots):
            self.recover()
        if all(slot.unit != unit for slot in self._ahead):
            self._turn_to(unit)
        while self._ahead[0].unit != unit:
            self._drop(self._ahead.popleft())
        slot = self._ahead.popleft()
        self._used = slot
        self.read_ahead()
        assert slot.reading is not None
        begin = perf_counter()
        try:
            slot.reading.wait()
        except BaseException:
            # Also after Ctrl-C, with reads under way: nothing else may be read into the buffer before they end.
            self._reader.cancel(slot.reading)
            self.release(unit)
            raise
        self.counts.waited += perf_counter() - begin
        self.counts.units += 1
        self.counts.nbytes += self.layouts[unit].read_bytes
        return slot

    def release(self, unit: int) -> None:
        """Give the slot of a unit back: the next read may begin."""
        slot = self._used
        assert slot is not None
        assert slot.unit == unit
        self._used = None
        self._free.append(slot)
        self.read_ahead()

    def recover(self) -> None:
        """Take every slot back, whatever an interrupt (Ctrl-C strikes between any two lines) has left half done."""
        self._used = None
        self._ahead.clear()
        self._free.clear()
        for slot in self.slots:
            self._drop(slot)

    def _turn_to(self, unit: int) -> None:
        self.counts.turns += bool(self.counts.units)
        while self._ahead:
            self._drop(self._ahead.pop())
        self._next = unit
        self.read_ahead()

    def _drop(self, slot: Slot) -> None:
        if slot.reading is not None:
            self._reader.cancel(slot.reading)
        slot.unit = -1
        self._free.append(slot)

    def close(self) -> None:
        """Stop reading and give the buffers back; nobody may be computing. Idempotent."""
        self.recover()
        self._free.clear()
        while self.slots:
            self.slots.pop().buffer.close()
