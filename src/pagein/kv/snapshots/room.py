"""How much the store may take: its cap, the disk's floor, and what is promised to snapshots that are being written."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pagein.kv.snapshots.answers import Skipped
from pagein.kv.snapshots.shelf import Shelf
from pagein.units import format_bytes

LARGEST_CAP = 20 * 1024**3
SHARE_OF_FREE = 10
"""The default cap is at most one part in so many of the free disk."""
FLOOR = 1024**3
"""Bytes that the disk must have free after a write, unless configured."""
SHARE_OF_DAMAGED = 10
"""What was moved aside takes at most one part in so many of the cap."""


@dataclass(slots=True)
class Room:
    """The account of the folder besides the snapshots themselves."""

    shelf: Shelf
    cap: int
    floor: int
    reserved: dict[Path, int] = field(default_factory=dict)
    """Bytes promised to each snapshot that is being written, by its path."""
    damaged: int = 0
    """Bytes of what was moved aside; it leaves before any snapshot does."""
    other: int = 0
    """Bytes of files that are none of ours."""

    def used(self, stored: int) -> int:
        """Bytes of all files in the folder, where the snapshots have ``stored``."""
        return stored + self.damaged + self.other

    def lacking(self, stored: int, total: int) -> int:
        """Bytes that must leave before ``total`` more may be written; what is being written counts as not yet begun."""
        promised = sum(self.reserved.values()) + total
        return max(self.used(stored) + promised - self.cap, self.floor + promised - self.shelf.free_bytes())

    def refusal(self, stored: int, total: int, may_leave: int) -> Skipped | None:
        """Why ``total`` bytes have no place even if ``may_leave`` bytes leave; None where they have."""
        if total > self.cap:
            return Skipped(f"it needs {format_bytes(total)}, the cap of the store is {format_bytes(self.cap)}")
        lacking = self.lacking(stored, total)
        if lacking <= max(may_leave, 0):
            return None
        return Skipped(
            f"no room: it needs {format_bytes(total)}, {format_bytes(lacking)} more than there are, and "
            f"{format_bytes(may_leave)} may leave (used {format_bytes(self.used(stored))} of {format_bytes(self.cap)}; "
            f"the disk has {format_bytes(self.shelf.free_bytes())} free and must keep {format_bytes(self.floor)})"
        )

    def set_aside(self, path: Path) -> None:
        """Move a damaged snapshot away."""
        self.shelf.set_aside(path, self.cap // SHARE_OF_DAMAGED)
        self.damaged = self.shelf.damaged_bytes()

    def drop_damaged(self) -> None:
        """Remove what was moved aside."""
        if self.damaged:
            self.shelf.trim_damaged(0)
            self.damaged = self.shelf.damaged_bytes()
