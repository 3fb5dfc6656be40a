"""Reads of one block, or of several that lie behind each other, verified; and what keeps blocks in place meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

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
    """Read pieces into a buffer back to back, and verify them; raises OSError, ShortRead, NotWhatWasWritten."""
    transfer.read(segment, block.slot.offset + block.offsets[chosen.start], _views(block, chosen, into))
    verify(block, chosen, into)


def read_run(segment: Segment, blocks: Sequence[Block], into: Sequence[memoryview]) -> None:
    """Read whole blocks of a run at once, each into its buffer; the caller verifies. Raises OSError, ShortRead."""
    views: list[memoryview] = []
    for block, view in zip(blocks, into, strict=True):
        views += _views(block, range(len(block.lengths)), view)
        views += [transfer.nowhere(block.gap)] if block.gap and block is not blocks[-1] else []
    transfer.read(segment, blocks[0].slot.offset, views)


def runs(blocks: Sequence[Block]) -> Iterator[list[int]]:
    """Places of blocks that lie behind each other in one file, together."""
    order, run = sorted(range(len(blocks)), key=lambda at: blocks[at].slot), list[int]()
    for at in order:
        if run:
            last, slot = blocks[run[-1]], blocks[at].slot
            if slot != (*last.slot[:2], last.slot.number + 1) or last.gap > transfer.MOST_NOWHERE:
                yield run
                run = []
        run.append(at)
    if run:
        yield run


def verify(block: Block, chosen: range, into: memoryview) -> None:
    """Compare pieces that were read with their digests; raises NotWhatWasWritten."""
    views = _pieces(block, chosen, into)
    got, want = digest(views), block.digests[DIGEST * chosen.start : DIGEST * chosen.stop]
    if got != want:
        wrong = next(at for at in range(len(views)) if got[DIGEST * at :][:DIGEST] != want[DIGEST * at :][:DIGEST])
        raise NotWhatWasWritten(f"piece {chosen.start + wrong} of {len(block.lengths)} is not what was written")


def _views(block: Block, chosen: range, into: memoryview) -> list[memoryview]:
    """Where pieces go: those of whole pages lie in the buffer as they do in the slot."""
    return [into] if block.even else _pieces(block, chosen, into)


def _pieces(block: Block, chosen: range, into: memoryview) -> list[memoryview]:
    views, at = [], 0
    for piece in chosen:
        views.append(into[at : at + block.lengths[piece]])
        at += block.lengths[piece]
    return views
