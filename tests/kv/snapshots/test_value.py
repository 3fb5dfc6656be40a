"""Who leaves the store first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pagein.kv.snapshots.value import Candidate, victims


def candidate(name, size=100, tokens=100, idle=10.0, saved=1.0, replaced=False):
    return Candidate(name, size, tokens, idle, saved, replaced)


def test_idle_large_and_cheap_to_recompute_leaves_first():
    """Each factor of idle seconds × bytes ÷ seconds saved decides where the others are equal."""
    assert victims([candidate("a"), candidate("b", idle=20.0)], 1) == ["b"]
    assert victims([candidate("a"), candidate("b", size=200)], 1) == ["b"]
    assert victims([candidate("a"), candidate("b", saved=0.5)], 1) == ["b"]


def test_what_is_replaced_leaves_before_all_others():
    """The predecessor of the snapshot to come is worth nothing once that is written."""
    assert victims([candidate("a", idle=1e6), candidate("b", idle=0.0, replaced=True)], 1) == ["b"]


def test_an_unmeasured_saving_counts_by_its_tokens():
    """Without a measurement, more tokens are worth more."""
    assert victims([candidate("a", tokens=10, saved=None), candidate("b", tokens=1000, saved=None)], 1) == ["a"]


@given(
    candidates=st.lists(
        st.builds(
            Candidate,
            id=st.uuids().map(str),
            bytes=st.integers(1, 1000),
            tokens=st.integers(1, 1000),
            idle_seconds=st.floats(0, 1e9),
            seconds_saved=st.none() | st.floats(-5, 1e6),
            replaced=st.booleans(),
        ),
        max_size=12,
    ),
    need=st.integers(-10, 5000),
)
def test_enough_leaves_and_not_more_than_needed(candidates, need):
    """The chosen free what is needed, without the last of them they would not; too few is None."""
    chosen = victims(candidates, need)
    size = {one.id: one.bytes for one in candidates}
    if chosen is None:
        assert sum(size.values()) < need
        return
    assert sum(size[one] for one in chosen) >= need
    assert not chosen or sum(size[one] for one in chosen[:-1]) < need
