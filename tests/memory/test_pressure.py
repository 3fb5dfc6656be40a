"""Calm, tight, critical: rises at once, falls slowly, and says why."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagein.memory.pressure import HOLD_SECONDS, SWAP_SECONDS, PressureGauge, PressureLevel, assess
from pagein.memory.probes.host import read_machine
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure

MIB = 1024**2
CALM, TIGHT, CRITICAL = PressureLevel.CALM, PressureLevel.TIGHT, PressureLevel.CRITICAL


def machine(
    available: int | None = 50,
    some: float | None = None,
    full: float | None = None,
    swapped_in: int | None = None,
    word: str | None = None,
    swapped_out: int | None = None,
) -> MachineSnapshot:
    """A machine of 100 MiB."""
    ram = PoolReading("ram", 100 * MIB, None if available is None else available * MIB, "physical memory")
    pressure = Pressure(some, full, word)
    return MachineSnapshot({"ram": ram}, pressure=pressure, swapped_in=swapped_in, swapped_out=swapped_out)


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
    """The growth over the last seconds counts, not the total since boot."""
    gauge = PressureGauge()
    assert gauge.observe(machine(swapped_in=900 * MIB), 0).level is CALM
    assert gauge.observe(machine(swapped_in=920 * MIB), SWAP_SECONDS).level is CALM
    state = gauge.observe(machine(swapped_in=1020 * MIB), 2 * SWAP_SECONDS)
    assert state.level is TIGHT
    assert state.signs == ("20.0 MiB/s read back from swap, from 10.0 MiB/s",)
    assert gauge.observe(machine(swapped_in=1220 * MIB), 3 * SWAP_SECONDS).level is CRITICAL


def test_swapping_out_counts_too():
    """What is written counts from twice the rate, with words of its own."""
    gauge = PressureGauge()
    gauge.observe(machine(swapped_out=0), 0)
    assert gauge.observe(machine(swapped_out=99 * MIB), SWAP_SECONDS).level is CALM
    state = gauge.observe(machine(swapped_out=219 * MIB), 2 * SWAP_SECONDS)
    assert (state.level, state.signs) == (TIGHT, ("24.0 MiB/s written to swap, from 20.0 MiB/s",))
    assert gauge.observe(machine(swapped_out=619 * MIB), 3 * SWAP_SECONDS).level is CRITICAL


def test_a_burst_of_swapping_is_spread_over_some_seconds():
    """40 MiB in half a second are 8 MiB/s: a program that woke up, no lasting need; the same again makes it tight."""
    gauge = PressureGauge()
    gauge.observe(machine(swapped_in=0), 0)
    assert gauge.observe(machine(swapped_in=40 * MIB), 0.5).level is CALM
    assert gauge.observe(machine(swapped_in=80 * MIB), 1).level is TIGHT


def test_a_burst_is_forgotten_after_those_seconds():
    """The window moves: what was read before it counts no more, so the hold begins when it has passed."""
    gauge = PressureGauge()
    for tick in range(200):
        now = tick / 2
        state = gauge.observe(machine(swapped_in=0 if tick == 0 else 80 * MIB), now)
        assert state.level is (CALM if tick == 0 or now >= 0.5 + SWAP_SECONDS + HOLD_SECONDS else TIGHT)
    assert len(gauge._counted) <= 2 * SWAP_SECONDS + 2


def test_a_gap_in_the_swap_counter_is_no_rate():
    """Without a counter at both ends there is no rate, and a counter that falls is none."""
    gauge = PressureGauge()
    for now, count in enumerate((None, 900 * MIB, None, 0)):
        assert gauge.observe(machine(swapped_in=count, swapped_out=count), now * SWAP_SECONDS).level is CALM


def replayed(text: str, root: Path) -> Iterator[tuple[float, MachineSnapshot]]:
    """Times and snapshots of a captured series: each part holds the texts of /proc at one second."""
    for part in text.split("== ")[1:]:
        second, _, files = part.partition("\n")
        for file in files.split("--- ")[1:]:
            name, _, content = file.partition("\n")
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(content)
        yield float(second), read_machine(root)


def test_a_captured_thrash_is_tight_and_then_calm(fixtures, tmp_path):
    """Six processes read 64 MiB of a file at random for 14 s, in a v1 group of 40 MiB on a machine with 14 GiB free.

    Stalls alone speak for it: available memory does not move. The level rises when PSI passes its threshold, stays
    while the average decays, and ends ten seconds after it fell below half.
    """
    gauge, seen = PressureGauge(), {}
    for second, snapshot in replayed((fixtures / "proc/thrash.txt").read_text(), tmp_path):
        assert snapshot.pools["ram"].available > snapshot.pools["ram"].total / 2
        seen[second] = gauge.observe(snapshot, second)
    tight = [second for second, state in seen.items() if state.level is TIGHT]
    assert (tight[0], tight[-1]) == (8, 39)
    assert len(tight) == 32
    assert seen[8].signs == ("PSI full 4.48 % over 10 s, from 3.5 %",)
    assert seen[35].signs == ()
    assert seen[40].level is CALM


@pytest.mark.parametrize(
    ("case", "level"),
    [("v2_nested", CALM), ("v2_container", CALM), ("v2_unlimited", CALM), ("v1_nested", CALM), ("hybrid", CALM)],
)
def test_captured_machines_at_rest_are_calm(fixtures, case, level):
    """Limits of every kind, with little pressure: nothing is made up."""
    assert assess(read_machine(fixtures / "cgroup" / case)).level is level
