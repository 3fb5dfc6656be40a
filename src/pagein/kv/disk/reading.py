"""One read of one block, verified; and what keeps blocks in place meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable

from pagein.kv.disk import transfer
from pagein.kv.disk.digest import DIGEST, digest
from pagein.kv.disk.segments import Segment
from pagein.kv.disk.tree import Block


class Hold:
    """Blocks that do not leave for others."""

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._once = threading.Lock()

    def release(self) -> None:
        """Let them go. Idempotent."""
        if self._once.acquire(blocking=False):
            self._end()


class NotWhatWasWritten(Exception):
    """The digest of a piece differs; the argument says of which."""


def read(segment: Segment, block: Block, chosen: range, into: memoryview) -> None:
    """Read pieces into a buffer back to back; raises OSError, ShortRead, NotWhatWasWritten."""
    views, at = [], 0
    for piece in chosen:
        views.append(into[at : at + block.lengths[piece]])
        at += block.lengths[piece]
    # Pieces of whole pages lie in the buffer as they do in the slot.
    transfer.read(segment, block.slot.offset + block.offsets[chosen.start], [into] if block.even else views)
    got, want = digest(views), block.digests[DIGEST * chosen.start : DIGEST * chosen.stop]
    if got != want:
        wrong = next(at for at in range(len(views)) if got[DIGEST * at :][:DIGEST] != want[DIGEST * at :][:DIGEST])
        raise NotWhatWasWritten(f"piece {chosen.start + wrong} of {len(block.lengths)} is not what was written")
