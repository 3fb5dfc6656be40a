"""Who leaves first."""

from hypothesis import given
from hypothesis import strategies as st

from pagein.residency.policy import Candidate, choose_victims, cool


def candidate(name, rank=1, ram=10, load=1.0, idle=60.0, heat=0.0):
    return Candidate(name, rank, {"ram": ram}, load, idle, heat)


def names(victims):
    return None if victims is None else [v.name for v in victims]


def test_lower_priority_leaves_first():
    """Priority decides before any cost."""
    cheap = candidate("cheap", rank=1, load=0.01)
    low = candidate("low", rank=0, load=100.0)
    assert names(choose_victims([cheap, low], {"ram": 5})) == ["low"]


def test_among_equals_the_cheapest_to_bring_back_per_byte_leaves():
    """Load seconds per byte freed, times how often it is used."""
    slow = candidate("slow", load=30.0)
    quick = candidate("quick", load=1.0)
    assert names(choose_victims([slow, quick], {"ram": 5})) == ["quick"]


def test_recency_and_frequency_count():
    """With equal load times the one that is used less and longer ago leaves."""
    assert names(choose_victims([candidate("hot", heat=9.0), candidate("cold")], {"ram": 5})) == ["cold"]
    assert names(choose_victims([candidate("new", idle=1), candidate("old", idle=900)], {"ram": 5})) == ["old"]


def test_who_is_not_needed_stays():
    """A small victim chosen early is kept when a later one suffices alone."""
    small = candidate("small", ram=1, load=0.001)
    big = candidate("big", ram=100, load=50.0)
    assert names(choose_victims([small, big], {"ram": 50})) == ["big"]


def test_too_little_in_total_is_said_before_anyone_leaves():
    """None, not a partial list."""
    assert choose_victims([candidate("a"), candidate("b")], {"ram": 21}) is None


def test_only_pools_that_lack_bytes_matter():
    """A model on another device is never a victim."""
    gpu = Candidate("gpu", 0, {"cuda:0": 100}, 0.1, 100.0, 0.0)
    assert names(choose_victims([gpu, candidate("cpu")], {"ram": 5, "cuda:0": 0})) == ["cpu"]


def test_a_use_counts_half_after_five_minutes():
    """The heat decays with its documented half-life."""
    assert cool(8.0, 300.0) == 4.0


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50), st.floats(0, 100), st.floats(0, 1e4)), max_size=8),
    st.integers(0, 200),
)
def test_victims_cover_the_deficit_and_none_is_superfluous(rows, deficit):
    """The choice is sufficient, minimal, and exists whenever all together suffice."""
    candidates = [Candidate(f"m{i}", r, {"ram": b}, load, idle, 0.0) for i, (r, b, load, idle) in enumerate(rows)]
    victims = choose_victims(candidates, {"ram": deficit})
    total = sum(c.bytes["ram"] for c in candidates)
    if deficit > total:
        assert victims is None
        return
    freed = sum(v.bytes["ram"] for v in victims)
    assert freed >= deficit
    assert all(freed - v.bytes["ram"] < deficit for v in victims)
