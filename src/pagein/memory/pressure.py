"""How hard memory is to get: calm, tight or critical, from available memory, stalls and swapping."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import StrEnum

from pagein.memory.snapshot import MachineSnapshot
from pagein.units import format_bytes


class PressureLevel(StrEnum):
    """How hard memory is to get."""

    CALM = "calm"
    """Nothing to do."""
    TIGHT = "tight"
    """Somebody waits for memory, or soon will."""
    CRITICAL = "critical"
    """The machine is about to thrash or to kill."""


_ORDER = tuple(PressureLevel)


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Where a level begins; all of RAM. Each sign counts alone, and an unknown sign counts nothing."""

    available: float
    """Share of the total below which it begins."""
    some: float
    """PSI "some" over ten seconds, percent."""
    full: float
    """PSI "full" over ten seconds, percent."""
    swap_in: float
    """Bytes per second read back from swap."""
    swap_out: float
    """Bytes per second written to swap."""

    def relaxed(self) -> Thresholds:
        """What must be passed the other way before the level ends: a quarter more memory, half the stalls."""
        return Thresholds(self.available * 1.25, self.some / 2, self.full / 2, self.swap_in / 2, self.swap_out / 2)


TIGHT = Thresholds(available=0.08, some=7.0, full=3.5, swap_in=10 * 1024**2, swap_out=20 * 1024**2)
"""``available``: the default budget leaves 10 %, so below 8 % somebody else has taken a part of that.
``some``: Android's lmkd calls 70 ms of stalls in a second partial pressure (ro.lmk.psi_partial_stall_ms).
``full``: half of that, since all tasks stand still.
``swap_in``: 2,560 page faults a second; at about 0.1 ms each from an SSD, a quarter of one core stands still.
``swap_out``: twice that. The kernel writes in the background, so nobody stands still yet; whoever uses those pages
again will, and half of them is a cautious guess of how many."""

CRITICAL = Thresholds(available=0.04, some=60.0, full=30.0, swap_in=40 * 1024**2, swap_out=80 * 1024**2)
"""``available``: half of tight, above the 2.5 % that hold the kernel's own reserves on small machines.
``full``: half of the 60 % over 30 s at which systemd-oomd kills by default (oomd.conf), to act before it.
``some``: that 60 % itself, for one of several models that stands still most of the time.
``swap_in``: by the figures above, a whole core stands still.
``swap_out``: twice that, as above."""

HOLD_SECONDS = 10.0
"""How long the signs must have eased before the level falls: the window of PSI's avg10."""

SWAP_SECONDS = 5.0
"""Time over which swapping is averaged: a program that is used again reads itself back in one burst, which is no sign
of lasting need."""


@dataclass(frozen=True, slots=True)
class SwapRate:
    """Bytes per second through swap; None where they are not counted, or not yet."""

    read: float | None = None
    written: float | None = None


@dataclass(frozen=True, slots=True)
class PressureState:
    """The level, and the signs that speak for it, with numbers; no signs when calm or when the level only lingers."""

    level: PressureLevel
    signs: tuple[str, ...] = ()


class PressureGauge:
    """Turns a series of snapshots into a level that rises at once and falls slowly. No clock of its own."""

    def __init__(self) -> None:
        self._state = PressureState(PressureLevel.CALM)
        self._eased_at: float | None = None
        self._counted: deque[tuple[float, int | None, int | None]] = deque()

    @property
    def state(self) -> PressureState:
        """The state after the last snapshot."""
        return self._state

    def observe(self, snapshot: MachineSnapshot, now: float) -> PressureState:
        """Take a snapshot at ``now`` (seconds of any steady clock) and return the state."""
        swap = self._swap_rate(snapshot, now)
        fresh = assess(snapshot, swap)
        floor = assess(snapshot, swap, relaxed=True)
        if _rank(fresh) >= _rank(self._state):
            self._state, self._eased_at = fresh, None
        elif _rank(floor) >= _rank(self._state):
            self._state, self._eased_at = replace(self._state, signs=floor.signs), None
        else:
            self._eased_at = now if self._eased_at is None else self._eased_at
            lingering = now - self._eased_at < HOLD_SECONDS
            self._state = replace(self._state, signs=()) if lingering else floor
        return self._state

    def _swap_rate(self, snapshot: MachineSnapshot, now: float) -> SwapRate:
        """What went through swap in the last seconds, spread over them; a shorter history counts as calm before."""
        counted = self._counted
        counted.append((now, snapshot.swapped_in, snapshot.swapped_out))
        while len(counted) > 2 and counted[1][0] <= now - SWAP_SECONDS:
            counted.popleft()
        (since, read, written), span = counted[0], max(SWAP_SECONDS, now - counted[0][0])
        if now <= since:
            return SwapRate()
        return SwapRate(_rate(read, snapshot.swapped_in, span), _rate(written, snapshot.swapped_out, span))


def assess(snapshot: MachineSnapshot, swap: SwapRate | None = None, *, relaxed: bool = False) -> PressureState:
    """Return the level that one snapshot speaks for, without memory of earlier ones."""
    for level, limits, word in (
        (PressureLevel.CRITICAL, CRITICAL, "critical"),
        (PressureLevel.TIGHT, TIGHT, "warn"),
    ):
        signs = _signs(snapshot, swap or SwapRate(), limits.relaxed() if relaxed else limits)
        if snapshot.pressure.word == word:
            signs.append(f"the system reports memory pressure: {word}")
        if signs:
            return PressureState(level, tuple(signs))
    return PressureState(PressureLevel.CALM)


def _signs(snapshot: MachineSnapshot, swap: SwapRate, limits: Thresholds) -> list[str]:
    signs = []
    ram, psi = snapshot.pools.get("ram"), snapshot.pressure
    if ram is not None and ram.available is not None and ram.available < ram.total * limits.available:
        signs.append(
            f"{format_bytes(ram.available)} of {format_bytes(ram.total)} available, below {limits.available * 100:g} %"
        )
    for name, value, limit in (("some", psi.some_avg10, limits.some), ("full", psi.full_avg10, limits.full)):
        if value is not None and value >= limit:
            signs.append(f"PSI {name} {value:g} % over 10 s, from {limit:g} %")
    for words, rate, limit in (
        ("read back from swap", swap.read, limits.swap_in),
        ("written to swap", swap.written, limits.swap_out),
    ):
        if rate is not None and rate >= limit:
            signs.append(f"{format_bytes(int(rate))}/s {words}, from {format_bytes(int(limit))}/s")
    return signs


def _rate(before: int | None, after: int | None, seconds: float) -> float | None:
    return None if before is None or after is None else max(0, after - before) / seconds


def _rank(state: PressureState) -> int:
    return _ORDER.index(state.level)
