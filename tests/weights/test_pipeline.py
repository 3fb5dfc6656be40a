"""A pass on paper: reads beside computing, as far as free buffers let them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.weights.planning.pipeline import Step, pass_seconds

READ = Step(1.0, 0.5, True)
STAYS = Step(0.0, 0.5, False)

steps = st.lists(
    st.builds(Step, st.floats(0, 10), st.floats(0, 10), st.just(True))
    | st.builds(Step, st.just(0.0), st.floats(0, 10), st.just(False)),
    max_size=30,
)


def test_reads_alone_count_where_computing_is_faster():
    """Units that all stream take their reads, one after the other, across the end of a pass."""
    assert pass_seconds([READ] * 6, 2) == pytest.approx(6.0)


def test_computing_alone_counts_where_reads_come_at_even_distances():
    """Between two reads lies as much computing as a read takes: nothing waits."""
    assert pass_seconds([READ, STAYS, STAYS] * 4, 2) == pytest.approx(6.0)


def test_reads_in_a_row_wait_for_buffers():
    """All reads at the end: as many as there are buffers are done by then, the others wait for a buffer."""
    at_the_end = [STAYS] * 12 + [READ] * 4
    two, three, four = (pass_seconds(at_the_end, slots) for slots in (2, 3, 4))
    assert (two, three, four) == (pytest.approx(9.0), pytest.approx(8.0), pytest.approx(8.0))


@given(steps, st.integers(1, 6))
def test_a_pass_takes_at_least_either_and_at_most_both(steps, slots):
    """Whatever streams where: no less than all reads or all computing, no more than their sum."""
    read, compute = sum(step.read for step in steps), sum(step.compute for step in steps)
    seconds = pass_seconds(steps, slots)
    assert max(read, compute) - 1e-6 <= seconds <= read + compute + 1e-6
