"""The ground: which blocks are free, and who holds the others."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pagein.kv.blocks.ground import Ground

BLOCKS = 24


class Rows(RuleBasedStateMachine):
    """Rows that grow, fork, crop and go, against plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.ground = Ground(BLOCKS)
        self.limit = BLOCKS
        self.rows: list[list[int]] = []

    def holders(self, block: int) -> int:
        return sum(row.count(block) for row in self.rows)

    def pick(self, data: Any) -> int:
        return int(data.draw(st.integers(0, len(self.rows) - 1)))

    @rule(count=st.integers(1, 9), expected=st.integers(0, 12))
    def begin(self, count: int, expected: int) -> None:
        free = self.ground.free
        got = self.ground.take(count, expected=expected)
        assert (got is None) == (count > free)
        if got is not None:
            assert len(set(got)) == count
            assert all(self.holders(block) == 0 and block < self.limit for block in got)
            self.rows.append(got)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), count=st.integers(1, 4))
    def grow(self, data: Any, count: int) -> None:
        row = self.rows[self.pick(data)]
        last = row[-1]
        behind = range(last + 1, last + 1 + count)
        could = last + count < self.limit and all(self.holders(block) == 0 for block in behind)
        free = self.ground.free
        got = self.ground.take(count, near=last)
        assert (got is None) == (count > free)
        if got is not None:
            assert got == list(behind) or not could
            assert all(self.holders(block) == 0 for block in got)
            row += got

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        row = list(self.rows[self.pick(data)])
        for block in row:
            self.ground.share(block)
        self.rows.append(row)

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), keep=st.integers(0, 6))
    def crop(self, data: Any, keep: int) -> None:
        index = self.pick(data)
        row = self.rows[index]
        gone, self.rows[index] = row[keep:], row[:keep]
        for at, block in enumerate(gone):
            left = self.holders(block) + gone[at + 1 :].count(block)
            assert self.ground.release(block) == (left == 0)
        self.rows = [row for row in self.rows if row]

    @rule(limit=st.integers(1, BLOCKS))
    def resize(self, limit: int) -> None:
        assert self.ground.resize(limit) == [block for block in range(limit, BLOCKS) if self.holders(block)]
        self.limit = limit

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def move(self, data: Any) -> None:
        block = self.rows[self.pick(data)][0]
        got = self.ground.take(1)
        if got is not None:
            self.ground.move(block, got[0])
            self.rows = [[got[0] if one == block else one for one in row] for row in self.rows]

    @invariant()
    def counts_are_those_of_the_rows(self) -> None:
        taken = {block for row in self.rows for block in row}
        assert [self.ground.count(block) for block in range(BLOCKS)] == [self.holders(block) for block in range(BLOCKS)]
        assert self.ground.taken == len(taken)
        assert self.ground.free == self.limit - len([block for block in taken if block < self.limit])

    def teardown(self) -> None:
        for row in self.rows:
            for block in row:
                self.ground.release(block)
        assert self.ground.taken == 0
        assert self.ground.resize(BLOCKS) == []
        assert self.ground.free == BLOCKS
        assert self.ground.take_run(BLOCKS) == list(range(BLOCKS))


TestRows = Rows.TestCase
TestRows.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(1, 40))
def test_new_rows_are_one_run_where_one_is_free(counts: list[int], expected: int) -> None:
    """A row is consecutive while any free run is long enough."""
    ground = Ground(40)
    for count in counts:
        got = ground.take(count, expected=expected)
        assert got is not None
        assert got == list(range(got[0], got[0] + count))


def test_rows_leave_each_other_room_to_grow() -> None:
    """Rows that were placed for 5 blocks each all reach them in place."""
    ground = Ground(32)
    rows = [ground.take(1, expected=5) or [] for _ in range(4)]
    for _ in range(4):
        for row in rows:
            row += ground.take(1, near=row[-1]) or []
    assert all(row == list(range(row[0], row[0] + 5)) for row in rows)


def test_room_to_grow_is_given_up_when_it_is_needed() -> None:
    """A soft claim never keeps a block from a row that finds no other."""
    ground = Ground(8)
    first = ground.take(1, expected=100)
    assert first == [0]
    second = ground.take(2, expected=2)
    assert second == [6, 7], "at the far end of the claim, so that its owner can still grow"
    assert ground.take(5) is not None
    assert ground.take(1) is None


def test_blocks_that_are_scattered_are_still_used() -> None:
    """Every free block can be taken, whatever lies between."""
    ground = Ground(6)
    assert ground.take(6) == [0, 1, 2, 3, 4, 5]
    for block in (0, 2, 4):
        ground.release(block)
    assert ground.take_run(2) is None
    assert sorted(ground.take(3) or []) == [0, 2, 4]
