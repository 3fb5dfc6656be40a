"""The ledger owns every byte of one pool.

At all times ``free + reserved + resident + releasing = budget + overdraft``, and overdraft is 0 unless something was
measured to take more than it was granted: the ledger records what is true, the scheduler then acts on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple


class Holding(StrEnum):
    """In which column a holder's bytes stand."""

    RESERVED = "reserved"
    """Granted to a load that has not finished."""
    RESIDENT = "resident"
    """Held by something that is loaded."""
    RELEASING = "releasing"
    """Given back, not yet measured to be free."""


class Totals(NamedTuple):
    """The columns of the ledger, bytes."""

    free: int
    reserved: int
    resident: int
    releasing: int
    overdraft: int


@dataclass(slots=True)
class _Entry:
    column: Holding
    bytes: int


class Ledger:
    """Bytes of one pool by holder. Acts assert their invariants; ask with ``can_reserve`` first."""

    def __init__(self, pool: str, budget: int) -> None:
        assert budget >= 0, f"a budget cannot be negative: {budget}"
        self.pool = pool
        self.budget = budget
        self._entries: dict[str, _Entry] = {}

    @property
    def held(self) -> int:
        """Bytes of all holders."""
        return sum(entry.bytes for entry in self._entries.values())

    @property
    def free(self) -> int:
        """Bytes that nobody holds; 0 while overdrawn."""
        return max(0, self.budget - self.held)

    @property
    def overdraft(self) -> int:
        """Bytes held beyond the budget."""
        return max(0, self.held - self.budget)

    def totals(self) -> Totals:
        """All columns at once."""
        sums = dict.fromkeys(Holding, 0)
        for entry in self._entries.values():
            sums[entry.column] += entry.bytes
        return Totals(
            self.free, sums[Holding.RESERVED], sums[Holding.RESIDENT], sums[Holding.RELEASING], self.overdraft
        )

    def bytes_of(self, holder: str) -> int:
        """Bytes of one holder, 0 when it holds nothing."""
        entry = self._entries.get(holder)
        return entry.bytes if entry is not None else 0

    def column_of(self, holder: str) -> Holding | None:
        """Where a holder stands, None when it holds nothing."""
        entry = self._entries.get(holder)
        return entry.column if entry is not None else None

    def can_reserve(self, count: int) -> bool:
        """Whether that many bytes are free."""
        return 0 <= count <= self.free

    def reserve(self, holder: str, count: int) -> None:
        """Reserve bytes for a load; they must be free, and the holder new."""
        assert self.can_reserve(count), f"{self.pool}: {count} bytes for {holder}, {self.free} free"
        assert holder not in self._entries, f"{self.pool}: {holder} holds bytes already"
        self._entries[holder] = _Entry(Holding.RESERVED, count)

    def reserve_more(self, holder: str, count: int) -> None:
        """What something asleep holds becomes a reservation of ``count`` bytes in all, for its wake."""
        entry = self._entries.get(holder)
        have = entry.bytes if entry is not None else 0
        assert self.can_reserve(max(0, count - have)), f"{self.pool}: {count} bytes for {holder}, {self.free} free"
        assert entry is None or entry.column is Holding.RESIDENT, f"{self.pool}: {holder} is {entry.column}"
        self._entries[holder] = _Entry(Holding.RESERVED, max(count, have))

    def confirm(self, holder: str) -> None:
        """A load finished: reserved becomes resident."""
        self._move(holder, Holding.RESERVED, Holding.RESIDENT)

    def begin_release(self, holder: str) -> None:
        """The holder is told to leave; its bytes count until they are measured free."""
        entry = self._entries[holder]
        assert entry.column is not Holding.RELEASING, f"{self.pool}: {holder} is leaving already"
        entry.column = Holding.RELEASING

    def finish_release(self, holder: str) -> int:
        """The bytes were measured to be back; returns how many."""
        entry = self._entries.pop(holder)
        assert entry.column is Holding.RELEASING, f"{self.pool}: {holder} was {entry.column}"
        return entry.bytes

    def resize(self, holder: str, count: int) -> None:
        """A holder was measured to take this much; may overdraw the pool."""
        assert count >= 0, f"{self.pool}: {holder} cannot hold {count} bytes"
        self._entries[holder].bytes = count

    def charge(self, holder: str, count: int) -> None:
        """Record bytes that are taken whatever the ledger says (the daemon's own); may overdraw the pool."""
        assert count >= 0, f"{self.pool}: {holder} cannot hold {count} bytes"
        self._entries[holder] = _Entry(Holding.RESIDENT, count)

    def check(self) -> None:
        """Assert the sum of the ledger; cheap, called by tests after every step."""
        t = self.totals()
        assert t.free + t.reserved + t.resident + t.releasing == self.budget + t.overdraft, t
        assert t.free == 0 or t.overdraft == 0, t

    def _move(self, holder: str, before: Holding, after: Holding) -> None:
        entry = self._entries[holder]
        assert entry.column is before, f"{self.pool}: {holder} is {entry.column}, not {before}"
        entry.column = after
