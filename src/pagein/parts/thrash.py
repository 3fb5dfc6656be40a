"""Notices parts that push each other out faster than they are of use, and slows that down. Pure: no clock.

A reload is a load of a part that left less than a minute ago and for which another must leave. One of them may begin
only once as much time has passed since the one before as keeps loading within its share of all time: with a share of
one half, after a load of 50 ms the next reload waits 50 ms. So there are at most ``60 × share ÷ seconds of a load``
reloads in a minute, however small or large the parts are, and a wait is never longer than a load over its share.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

WINDOW = 60.0
"""Seconds over which loads are counted, and within which a part that comes back had left too early."""


@dataclass(frozen=True, slots=True)
class ThrashRules:
    """How much coming and going is too much."""

    share: float = 0.5
    """Of all time, that reloads may take."""
    reloads: int = 6
    """In a minute, from which on it is called thrash."""
    loads_per_minute: int | None = None
    """A bound on reloads in a minute in place of the share's; None: the share's alone."""


@dataclass(frozen=True, slots=True)
class ThrashReport:
    """What `/health/lazy` says of the last minute."""

    loads: int
    reloads: int
    bound: int | None
    """Reloads in a minute that are let through; None while nothing is known of how long they take."""
    seconds_loading: float
    parts: tuple[str, ...]
    """Which parts came back, sorted."""
    thrashing: bool


@dataclass(frozen=True, slots=True)
class _Load:
    at: float
    part: str
    seconds: float
    again: bool


class Pace:
    """The loads of the last minute."""

    def __init__(self, rules: ThrashRules) -> None:
        assert 0 < rules.share <= 1, rules.share
        assert rules.loads_per_minute is None or rules.loads_per_minute > 0, rules.loads_per_minute
        self.rules = rules
        self._loads: deque[_Load] = deque()
        self._begun: dict[str, tuple[float, bool]] = {}
        self._next_at = 0.0
        # Kept as loads come and go: the guard asks far more often than parts load.
        self._again = 0
        self._again_seconds = 0.0

    def begin(self, part: str, now: float, seconds: float, again: bool) -> None:
        """A load begins; it is expected to take so long."""
        self._begun[part] = (now, again)
        if again:
            self._next_at = max(self._next_at, now + seconds / self.rules.share)

    def end(self, part: str, now: float, seconds: float) -> None:
        """A load has ended and took so long."""
        began, again = self._begun.pop(part, (now, False))
        self._loads.append(_Load(now, part, seconds, again))
        if again:
            self._next_at = max(self._next_at, began + seconds / self.rules.share)
            self._again += 1
            self._again_seconds += seconds
        self._forget(now)

    def fail(self, part: str) -> None:
        """A load came to nothing."""
        self._begun.pop(part, None)

    def wait(self, now: float) -> float:
        """Return the seconds until a reload may begin."""
        self._forget(now)
        wait = max(0.0, self._next_at - now)
        limit = self.rules.loads_per_minute
        if limit is not None:
            underway = sum(again for _, again in self._begun.values())
            ended = [load for load in self._loads if load.again]
            over = underway + len(ended) - limit
            if over >= 0:
                first = ended[min(over, len(ended) - 1)].at if ended else now
                wait = max(wait, first + WINDOW - now)
        return wait

    def is_thrash(self, now: float) -> bool:
        """Tell whether parts come back in such numbers that other victims should be chosen."""
        self._forget(now)
        return self._again >= self.rules.reloads

    def report(self, now: float) -> ThrashReport:
        """Say what the last minute was like."""
        self._forget(now)
        seconds = sum(load.seconds for load in self._loads)
        parts = tuple(sorted({load.part for load in self._loads if load.again}))
        return ThrashReport(len(self._loads), self._again, self.bound(), seconds, parts, self.is_thrash(now))

    def counts(self, now: float) -> tuple[int, int]:
        """Return the reloads of the last minute, and how many one may have."""
        self._forget(now)
        return self._again, self.bound() or 1

    def bound(self) -> int | None:
        """Return how many reloads a minute may have; None while no reload was measured."""
        if self.rules.loads_per_minute is not None:
            return self.rules.loads_per_minute
        if self._again == 0 or self._again_seconds <= 0:
            return None
        return max(1, int(self.rules.share * WINDOW * self._again / self._again_seconds))

    def _forget(self, now: float) -> None:
        while self._loads and self._loads[0].at <= now - WINDOW:
            gone = self._loads.popleft()
            if gone.again:
                self._again -= 1
                self._again_seconds -= gone.seconds
