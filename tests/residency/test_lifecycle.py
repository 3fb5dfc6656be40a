"""Only the listed moves are legal."""

import itertools

import pytest

from pagein.residency.lifecycle import MOVES, Lifecycle, State


@pytest.mark.parametrize(("before", "after"), list(itertools.product(State, State)))
def test_moves(before, after):
    """A move outside the table is refused, one inside it changes state and time."""
    life = Lifecycle()
    life.state = before
    if after in MOVES[before]:
        life.move(after, 7.0)
        assert (life.state, life.since) == (after, 7.0)
    else:
        with pytest.raises(AssertionError, match="no move"):
            life.move(after, 7.0)


def test_every_state_can_end_absent():
    """No state is a dead end."""
    for start in State:
        seen, todo = {start}, [start]
        while todo:
            for after in MOVES[todo.pop()] - seen:
                seen.add(after)
                todo.append(after)
        assert State.ABSENT in seen
