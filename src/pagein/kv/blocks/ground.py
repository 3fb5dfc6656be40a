"""The blocks of one arena: which are free, how many hold each of the others, and where a new one goes. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_GAP = 1.3
"""Room that a row is placed with, by the size that it is expected to reach (K2): given up when others need it."""
_RUNS = re.compile(rb"\x01+")


class Ground:
    """Block ids 0 to N-1 with reference counts. Not safe across threads: `DeviceTier` has the lock.

    Invariant: an id is free exactly where its count is 0; free + taken = blocks, over the ids below the limit.
    """

    def __init__(self, blocks: int) -> None:
        assert blocks >= 0, blocks
        self._counts = [0] * blocks
        self._free = bytearray(b"\x01" * blocks)
        self._taken = 0
        self._limit = blocks
        self._claims: dict[int, int] = {}
        """Last block of a row that may grow: first id that it has no soft claim to any more."""

    @property
    def blocks(self) -> int:
        """Ids that may be handed out: 0 to this, exclusive (`resize`)."""
        return self._limit

    @property
    def taken(self) -> int:
        """Blocks that somebody holds."""
        return self._taken

    @property
    def free(self) -> int:
        """Blocks that `take` can hand out."""
        return self._free.count(1, 0, self._limit)

    def count(self, block: int) -> int:
        """Holders of a block; 0 where it is free."""
        return self._counts[block]

    def can_take(self, count: int) -> bool:
        """Tell whether so many blocks are free."""
        return count <= self.free

    def take(self, count: int, near: int | None = None, expected: int = 0) -> list[int] | None:
        """Hand out blocks with a count of 1 each; None, and nothing changed, where there are too few.

        They are one run of consecutive ids wherever possible: right behind ``near``, a row's last block; else in the
        largest free run, with room to reach ``expected`` blocks behind its first.
        """
        if count == 0:
            return []
        if near is not None:
            place = near + 1
            if self._fits(place, count):
                return self._hand_out(range(place, place + count), self._claims.pop(near, 0))
        found = self._place(count, max(count, expected))
        if found is not None:
            return self._hand_out(*found)
        return self._scatter(count)

    def take_run(self, count: int, expected: int = 0) -> list[int] | None:
        """Hand out consecutive blocks only; None, and nothing changed, where no free run is that long."""
        found = self._place(count, max(count, expected))
        return None if found is None else self._hand_out(*found)

    def share(self, block: int) -> None:
        """Add a holder to a block that somebody has."""
        assert self._counts[block] > 0, f"block {block} is free"
        self._counts[block] += 1

    def release(self, block: int) -> bool:
        """Take a holder off a block; True where it was the last, and the block is free."""
        assert self._counts[block] > 0, f"block {block} is free"
        self._counts[block] -= 1
        if self._counts[block]:
            return False
        self._free[block] = 1
        self._taken -= 1
        self._claims.pop(block, None)
        return True

    def move(self, block: int, target: int) -> None:
        """Let all holders of a block hold ``target`` instead, which only the caller has; the block is free then."""
        assert self._counts[target] == 1, f"block {target} has {self._counts[target]} holders"
        self._counts[target] = self._counts[block]
        self._counts[block] = 1
        self.release(block)

    def in_the_way(self, blocks: int) -> list[int]:
        """Ids from ``blocks`` on that are taken."""
        return [block for block in range(blocks, len(self._counts)) if self._counts[block]]

    def resize(self, blocks: int) -> list[int]:
        """Hand out ids below ``blocks`` only from now on; return the taken ones that are beyond."""
        assert blocks >= 0, blocks
        if blocks > len(self._counts):
            more = blocks - len(self._counts)
            self._counts += [0] * more
            self._free += b"\x01" * more
        self._limit = blocks
        return self.in_the_way(blocks)

    def _fits(self, place: int, count: int) -> bool:
        return place + count <= self._limit and self._free.count(1, place, place + count) == count

    def _place(self, count: int, expected: int) -> tuple[range, int] | None:
        """Where a run goes, and the end of its claim: outside of others' claims, else at the far end of one."""
        unclaimed = bytearray(self._free[: self._limit])
        for last, end in self._claims.items():
            stop = min(end, self._limit)
            if last + 1 < stop:
                unclaimed[last + 1 : stop] = bytes(stop - last - 1)
        first, size = _largest(unclaimed)
        if size >= count:
            return range(first, first + count), first + min(size, int(expected * _GAP) + 1)
        first, size = _largest(self._free[: self._limit])
        if size >= count:
            return range(first + size - count, first + size), 0
        return None

    def _scatter(self, count: int) -> list[int] | None:
        if not self.can_take(count):
            return None
        found: list[int] = []
        free = bytes(self._free[: self._limit])
        for run in sorted(_RUNS.finditer(free), key=lambda run: run.start() - run.end()):
            found += range(run.start(), min(run.end(), run.start() + count - len(found)))
            if len(found) == count:
                break
        return self._hand_out(found, 0)

    def _hand_out(self, blocks: Sequence[int], claim: int) -> list[int]:
        for block in blocks:
            assert not self._counts[block], f"block {block} is taken"
            self._counts[block] = 1
            self._free[block] = 0
        self._taken += len(blocks)
        if claim > blocks[-1] + 1:
            self._claims[blocks[-1]] = claim
        return list(blocks)


def _largest(free: bytes | bytearray) -> tuple[int, int]:
    """First id and length of the longest run of free blocks, the earliest of equal ones."""
    best, size = 0, 0
    for run in _RUNS.finditer(free):
        if run.end() - run.start() > size:
            best, size = run.start(), run.end() - run.start()
    return best, size
