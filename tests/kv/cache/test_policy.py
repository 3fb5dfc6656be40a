"""Who leaves a tier, and how much of the last one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.kv.tiers.policy import LONG_BLOCKS, Idle, can_free, victims


def idle(number: int, blocks: int = 4, seconds: float = 10.0, **fields: object) -> Idle:
    """A conversation of one group; a block frees one unit."""
    given_ = {"frees": (blocks,), "blocks": blocks, "bytes": blocks * 100, "seconds_back": 1.0}
    return Idle(number, idle_seconds=seconds, **{**given_, **fields})  # type: ignore[arg-type]


def test_finished_leave_first():
    """What is finished leaves before anything idle, however cold that is."""
    assert [one.id for one in victims([idle(1, seconds=1e6), idle(2, seconds=1, finished=True)], [4])] == [2]


def test_coldest_leave_next():
    """Of two of the same size and price the one that is idle for longer leaves."""
    assert [one.id for one in victims([idle(1, seconds=5), idle(2, seconds=50)], [4])] == [2]


def test_dear_ones_stay():
    """Of two of the same size the one that comes back cheaply leaves, even where it was used later."""
    chosen = victims([idle(1, seconds=50, seconds_back=100.0), idle(2, seconds=10)], [4])
    assert [one.id for one in chosen] == [2]


def test_pinned_never():
    """A pinned conversation never leaves, also where the need is not met without it."""
    assert victims([idle(1, pinned=True)], [4]) == []


def test_whole_ones_before_parts():
    """Short conversations leave as a whole, as many as are needed."""
    chosen = victims([idle(number, blocks=4, seconds=number) for number in range(1, 5)], [8])
    assert [(one.id, one.blocks) for one in chosen] == [(4, None), (3, None)]


def test_long_one_loses_its_end():
    """Of a long conversation only the end leaves where that is enough."""
    chosen = victims([idle(1, blocks=4 * LONG_BLOCKS)], [5])
    assert [(one.id, one.blocks) for one in chosen] == [(1, 5)]


def test_uncuttable_leaves_whole():
    """What a prefix is of no use to (windows, side state) leaves as a whole."""
    chosen = victims([idle(1, blocks=4 * LONG_BLOCKS, cuttable=False)], [5])
    assert [(one.id, one.blocks) for one in chosen] == [(1, None)]


def test_only_useful_ones():
    """A conversation that frees nothing of what lacks stays."""
    full, sliding = idle(1, frees=(3, 0), seconds=99), idle(2, frees=(0, 3))
    assert [one.id for one in victims([full, sliding], [0, 2])] == [2]


def test_reasons_have_numbers():
    """Each choice says why."""
    assert "idle for 10 s" in victims([idle(1)], [1])[0].reason


@given(
    st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1e4), st.booleans(), st.booleans()), max_size=12),
    st.integers(0, 200),
)
def test_enough_and_no_more(sizes: list[tuple[int, float, bool, bool]], need: int):
    """What leaves is enough where all together have enough, the last one is needed, and nobody pinned leaves."""
    every = [
        idle(number, blocks, seconds, pinned=pinned, finished=finished)
        for number, (blocks, seconds, pinned, finished) in enumerate(sizes)
    ]
    chosen = victims(every, [need])
    frees = [every[one.id].frees[0] if one.blocks is None else one.blocks for one in chosen]
    have = (can_free(every) or [0])[0]
    assert sum(frees) >= min(need, have)
    assert not any(every[one.id].pinned for one in chosen)
    if chosen:
        assert sum(frees[:-1]) < need


def test_sums():
    """What all could free is the sum over those that may leave."""
    assert can_free([idle(1, 3), idle(2, 4), idle(3, 5, pinned=True)]) == [7]
    assert can_free([]) == []


def test_units_agree():
    """Needs and amounts are in the same units; others are a fault of the caller."""
    with pytest.raises(ValueError, match="zip"):
        victims([idle(1)], [1, 1])
