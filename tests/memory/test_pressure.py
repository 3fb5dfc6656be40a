"""Calm, tight, critical: rises at once, falls slowly, and says why."""

import pytest

from pagein.memory.pressure import HOLD_SECONDS, PressureGauge, PressureLevel, assess
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure

MIB = 1024**2
CALM, TIGHT, CRITICAL = PressureLevel.CALM, PressureLevel.TIGHT, PressureLevel.CRITICAL


def machine(
    available: int | None = 50,
    some: float | None = None,
    full: float | None = None,
    swapped_in: int | None = None,
    word: str | None = None,
) -> MachineSnapshot:
    """A machine of 100 MiB."""
    ram = PoolReading("ram", 100 * MIB, None if available is None else available * MIB, "physical memory")
    return MachineSnapshot({"ram": ram}, pressure=Pressure(some, full, word), swapped_in=swapped_in)


@pytest.mark.parametrize(
    ("seen", "level"),
    [
        (machine(available=8), CALM),
        (machine(available=7), TIGHT),
        (machine(available=4), TIGHT),
        (machine(available=3), CRITICAL),
        (machine(some=6.9, full=3.4), CALM),
        (machine(some=7.0), TIGHT),
        (machine(full=3.5), TIGHT),
        (machine(full=30.0), CRITICAL),
        (machine(some=60.0), CRITICAL),
        (machine(word="normal"), CALM),
        (machine(word="warn"), TIGHT),
        (machine(word="critical"), CRITICAL),
    ],
)
def test_each_sign_counts_alone(seen, level):
    """One sign past its threshold sets the level."""
    assert assess(seen).level is level


def test_unknown_signs_count_nothing():
    """A machine that reports nothing is calm, not at zero memory."""
    assert assess(machine(available=None)).level is CALM
    assert assess(MachineSnapshot(pools={})).level is CALM


def test_signs_carry_their_numbers():
    """The reason names what was measured and the threshold."""
    (sign,) = assess(machine(some=12.5)).signs
    assert sign == "PSI some 12.5 % over 10 s, from 7 %"
    (sign,) = assess(machine(available=5)).signs
    assert sign == "5.0 MiB of 100 MiB available, below 8 %"


def test_the_level_rises_at_once():
    """One bad snapshot is enough to rise, by two levels too."""
    gauge = PressureGauge()
    assert gauge.observe(machine(), 0).level is CALM
    assert gauge.observe(machine(available=1), 0.5).level is CRITICAL


def test_the_level_falls_only_after_the_signs_have_stayed_away():
    """Falling takes the hold time, counted from the first eased snapshot."""
    gauge = PressureGauge()
    gauge.observe(machine(available=1), 0)
    assert gauge.observe(machine(), 1).level is CRITICAL
    assert gauge.observe(machine(), 1 + HOLD_SECONDS - 0.1).level is CRITICAL
    assert gauge.observe(machine(), 1 + HOLD_SECONDS).level is CALM


@pytest.mark.parametrize("relapse", [7, 9])
def test_a_relapse_starts_the_hold_anew(relapse):
    """Signs that come back while the level lingers, past the threshold or only its relaxed form, take back the time."""
    gauge = PressureGauge()
    gauge.observe(machine(available=7), 0)
    gauge.observe(machine(), 1)
    gauge.observe(machine(available=relapse), 9)
    assert gauge.observe(machine(), 12).level is TIGHT
    assert gauge.observe(machine(), 12 + HOLD_SECONDS - 0.1).level is TIGHT
    assert gauge.observe(machine(), 12 + HOLD_SECONDS).level is CALM


def test_a_little_better_is_not_calm():
    """Between the threshold and its relaxed form the level stays, however long."""
    gauge = PressureGauge()
    gauge.observe(machine(available=7), 0)
    for second in range(1, 60):
        assert gauge.observe(machine(available=9), second).level is TIGHT  # tight below 8, over only from 10
    assert "below 10 %" in gauge.state.signs[0]


def test_critical_falls_to_tight_where_tight_signs_remain():
    """After the hold the level is what the remaining signs speak for."""
    gauge = PressureGauge()
    gauge.observe(machine(available=1), 0)
    gauge.observe(machine(available=7), 1)
    assert gauge.observe(machine(available=7), 1 + HOLD_SECONDS).level is TIGHT


def test_swapping_in_counts_as_a_rate():
    """The difference of two snapshots over the time between them counts, not the total since boot."""
    gauge = PressureGauge()
    assert gauge.observe(machine(swapped_in=900 * MIB), 0).level is CALM
    assert gauge.observe(machine(swapped_in=904 * MIB), 1).level is CALM
    state = gauge.observe(machine(swapped_in=944 * MIB), 3)
    assert state.level is TIGHT
    assert state.signs == ("20.0 MiB/s read back from swap, from 10.0 MiB/s",)
    assert gauge.observe(machine(swapped_in=965 * MIB), 3.5).level is CRITICAL


def test_a_gap_in_the_swap_counter_is_no_rate():
    """Without a counter at both ends there is no rate."""
    gauge = PressureGauge()
    gauge.observe(machine(swapped_in=None), 0)
    assert gauge.observe(machine(swapped_in=900 * MIB), 1).level is CALM
    assert gauge.observe(machine(swapped_in=None), 2).level is CALM
