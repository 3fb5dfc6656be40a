"""When a restore or a save pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.kv.snapshots.worth import TRY_AGAIN, Line, Pace, Speed


def pace(tokens_per_second, bytes_per_second, fixed=0.02):
    """A pace that was measured at these speeds."""
    made = Pace()
    for _ in range(30):
        made.prefilled(1000, 1000 / tokens_per_second)
        for size in (10**6, 10**8):
            made.restored(size, fixed + size / bytes_per_second)
            made.saved(size, fixed + size / bytes_per_second)
    return made


def test_a_slow_machine_restores():
    """120 tokens/s against a disk of 1 GB/s: 2048 tokens of 47 MB are restored, and the reason has the numbers."""
    verdict = pace(120, 1e9).can_restore(2048, 47_000_000)
    assert verdict.pays
    assert verdict.seconds_saved == pytest.approx(2048 / 120 - 0.02 - 0.047, rel=0.01)
    assert "2048 tokens" in verdict.reason
    assert "120 tokens/s" in verdict.reason


def test_a_fast_machine_does_not():
    """30,000 tokens/s against a disk of 3 GB/s: 4096 tokens of 537 MB are computed, and it is said (scenario 21)."""
    verdict = pace(30_000, 3e9).can_restore(4096, 537_000_000)
    assert not verdict.pays
    assert verdict.seconds_saved < 0
    assert verdict.reason.startswith(
        "not worth it: restoring 4096 tokens (512 MiB) takes 199 ms, computing them 137 ms"
    )


def test_the_fixed_cost_counts_for_few_tokens():
    """At 1000 tokens/s and 100 ms of fixed cost, 50 tokens lose and 200 win."""
    made = pace(1000, 1e9, fixed=0.1)
    assert not made.can_restore(50, 50 * 1000).pays
    assert made.can_restore(200, 200 * 1000).pays


def test_an_unmeasured_restore_is_tried():
    """Until it is measured, a conversation of a usual size is restored, and the reason says that it is a guess."""
    verdict = Pace().can_restore(1000, 50_000_000)
    assert verdict.pays
    assert "not all measured yet" in verdict.reason


def test_what_lost_once_is_tried_again():
    """After a row of skips one restore is tried, so that one slow read does not rule for ever."""
    made = pace(30_000, 1e8)
    for _ in range(TRY_AGAIN):
        verdict = made.can_restore(1000, 50_000_000)
        assert not verdict.pays
        made.decided(verdict)
    again = made.can_restore(1000, 50_000_000)
    assert again.pays
    assert "once more" in again.reason
    made.decided(again)
    assert not made.can_restore(1000, 50_000_000).pays


def test_asking_changes_nothing():
    """The question may be asked any number of times."""
    made = pace(30_000, 1e8)
    assert len({made.can_restore(1000, 50_000_000).reason for _ in range(3 * TRY_AGAIN)}) == 1


def test_a_save_keeps_to_its_bound():
    """Before an eviction a save that takes longer than the bound is not begun; without a bound it is."""
    made = pace(120, 1e8)
    refused = made.can_save(2048, 47_000_000, bound=0.3)
    assert not refused.pays
    assert "the bound is 300 ms" in refused.reason
    assert made.can_save(2048, 47_000_000, bound=1.0).pays
    assert made.can_save(2048, 47_000_000, bound=None).pays


def test_a_snapshot_that_would_never_be_restored_is_not_saved():
    """Where recomputing wins, saving is skipped as well."""
    verdict = pace(30_000, 1e8).can_save(1000, 50_000_000, bound=None)
    assert not verdict.pays
    assert verdict.reason.count("not worth it") == 1


def test_short_prefills_count_for_less():
    """A prompt of one token measures the overhead of a call, and hardly moves the speed."""
    made = pace(1000, 1e9)
    made.prefilled(1, 0.5)
    assert made.prefill.value == pytest.approx(1000, rel=0.01)


@pytest.mark.parametrize("nothing", [(0, 1.0), (10, 0.0), (-1, 1.0), (10, -1.0)])
def test_what_is_no_measurement_is_left_out(nothing):
    """No units or no time leaves the start value."""
    speed, line = Speed(500.0), Line(1e9)
    speed.observe(*nothing)
    line.observe(*nothing)
    assert (speed.value, speed.measured, line.measured) == (500.0, False, False)


@given(
    measured=st.lists(st.tuples(st.integers(1, 10**11), st.floats(1e-6, 1e4)), min_size=1, max_size=30),
    size=st.integers(1, 10**11),
)
def test_an_estimate_is_always_positive_and_grows_with_the_size(measured, size):
    """Whatever was measured, more bytes never take less time and no time is negative."""
    line = Line(1e9)
    for bytes_moved, seconds in measured:
        line.observe(bytes_moved, seconds)
    assert 0 < line.seconds(size) <= line.seconds(2 * size)


@given(fixed=st.floats(0, 1), speed=st.floats(1e6, 1e10))
def test_a_line_is_found_again(fixed, speed):
    """Measurements that lie on a line give that line back."""
    line = Line(1e9)
    for size in (10**6, 10**8, 10**7, 10**9):
        line.observe(size, fixed + size / speed)
    assert line.seconds(5 * 10**8) == pytest.approx(fixed + 5 * 10**8 / speed, rel=1e-3)
