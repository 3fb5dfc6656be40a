"""Reads blocks through, in the order in which they lie on the disk: a part at a time, so that nobody waits for long."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pagein.errors import BlockDamaged
from pagein.kv.disk.answers import Ref
from pagein.kv.disk.segments import Slot

if TYPE_CHECKING:
    from pagein.kv.disk.store import BlockStore

_PLACE = re.compile(r"([0-9]{1,15})-([0-9]{1,6})-([0-9]{1,9})")
SECONDS = 2.0
"""What one part takes, but for its last block."""
DIGITS = 12


@dataclass(frozen=True, slots=True)
class Damage:
    """A block that was not what was written; it is dropped."""

    ref: Ref
    reason: str


@dataclass(frozen=True, slots=True)
class Checked:
    """One part of a check."""

    blocks: int
    bytes: int
    damaged: tuple[Damage, ...]
    left: int
    """Bytes of blocks that are still to be read."""
    next: str | None
    """Where to go on; None where all was read."""

    def told(self) -> dict[str, Any]:
        """The same for another process, JSON-ready; a block by the first digits of its key."""
        faults = [[one.ref.key.hex()[:DIGITS], one.reason] for one in self.damaged]
        return {"checked": self.blocks, "bytes": self.bytes, "faults": faults, "left": self.left, "next": self.next}


def check(
    store: BlockStore, after: str | None, seconds: float | None = None, clock: Callable[[], float] = time.monotonic
) -> Checked:
    """Read the blocks behind a place for `SECONDS` or so many, one at least; ValueError for what is no place."""
    seconds = SECONDS if seconds is None else seconds
    behind = None if after is None else _place(after)
    begun, damaged, blocks, size = clock(), list[Damage](), 0, 0
    waiting = [one for one in store.by_place() if behind is None or one[0] > behind]
    left = sum(ref.bytes for _, ref in waiting)
    for slot, ref in waiting:
        if blocks and clock() - begun >= seconds:
            break
        try:
            store.read(ref, bytearray(ref.bytes))
        except BlockDamaged as error:
            if not error.gone:
                damaged.append(Damage(ref, error.message))
        blocks, size, behind = blocks + 1, size + ref.bytes, slot
    more = blocks < len(waiting) and behind is not None
    return Checked(blocks, size, tuple(damaged), left - size, "-".join(map(str, behind or ())) if more else None)


def _place(text: str) -> Slot:
    match = _PLACE.fullmatch(text)
    if match is None:
        raise ValueError("a check goes on where the one before said that it ended")
    return Slot(int(match[1]), int(match[2]), int(match[3]))
