"""When a restore or a save pays: measured speeds against each other, in words and numbers. Pure.

A restore wins when fixed cost + bytes ÷ restore speed < tokens ÷ prefill speed. On a CPU it nearly always does; a large
GPU computes small models faster than a disk reads their cache (SGLang #26305, Dynamo #6101), so both are measured.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagein.units import format_bytes, format_duration

START_PREFILL = 500.0
"""Tokens per second until a prefill was measured: a slow machine's figure, so that the first restore is tried."""
START_RESTORE = 200e6
"""Bytes per second until a restore was measured: below what any local disk and one core's sha256 do."""
START_SAVE = 50e6
START_FIXED = 0.02
"""Seconds that a restore or save takes besides its bytes, until measured."""
MEMORY = 0.8
"""What an older observation weighs against the next."""
FULL_PREFILL = 256
"""Tokens from which a prefill tells the speed and not the overhead of a call; a shorter one counts for less."""
TRY_AGAIN = 16
"""After so many skips in a row, one restore is tried all the same: what was slow once may be fast now."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether it pays, and why."""

    pays: bool
    reason: str
    seconds_saved: float
    """Less than 0 where it would lose."""


@dataclass(slots=True)
class Speed:
    """A running mean of units per second."""

    start: float
    _mean: float | None = None

    @property
    def measured(self) -> bool:
        """True once anything was observed."""
        return self._mean is not None

    @property
    def value(self) -> float:
        """Units per second; the start value until measured."""
        return self.start if self._mean is None else self._mean

    def observe(self, units: float, seconds: float, weight: float = 1.0) -> None:
        """Add a measurement; what is no measurement (nothing done, no time) is left out."""
        if units <= 0 or seconds <= 0 or weight <= 0:
            return
        share = 1.0 if self._mean is None else (1 - MEMORY) * min(weight, 1.0)
        self._mean = (1 - share) * self.value + share * units / seconds

    def figures(self) -> list[float]:
        """The mean, or nothing before a measurement."""
        return [] if self._mean is None else [self._mean]

    def recall(self, figures: Sequence[float]) -> None:
        """Go on from `figures`; ValueError for others."""
        if len(figures) > 1 or 0 in figures:
            raise ValueError(f"a speed is one number above 0, not {list(figures)[:5]}")
        self._mean = figures[0] if figures else None


@dataclass(slots=True)
class Line:
    """Seconds = fixed + bytes ÷ speed, fitted to measurements of which older ones count for less (least squares)."""

    start_speed: float
    _n: float = 0.0
    _x: float = 0.0
    _y: float = 0.0
    _xx: float = 0.0
    _xy: float = 0.0

    @property
    def measured(self) -> bool:
        """True once anything was observed."""
        return self._n > 0

    def observe(self, size: int, seconds: float) -> None:
        """Add a measurement."""
        if size <= 0 or seconds <= 0:
            return
        sums = (self._n, self._x, self._y, self._xx, self._xy)
        added = (1.0, size, seconds, size * size, size * seconds)
        self._n, self._x, self._y, self._xx, self._xy = (
            MEMORY * old + new for old, new in zip(sums, added, strict=True)
        )

    def figures(self) -> list[float]:
        """The sums, or nothing before a measurement."""
        return [self._n, self._x, self._y, self._xx, self._xy] if self.measured else []

    def recall(self, figures: Sequence[float]) -> None:
        """Go on from `figures`; ValueError for others."""
        if len(figures) not in (0, 5) or 0 in figures:
            raise ValueError(f"a line has five sums above 0, not {list(figures)[:5]}")
        self._n, self._x, self._y, self._xx, self._xy = figures or [0.0] * 5

    def seconds(self, size: int) -> float:
        """What so many bytes are expected to take; the start values until measured."""
        if not self.measured:
            return START_FIXED + size / self.start_speed
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread > (0.05 * mean_x) ** 2:
            slope = (self._xy / self._n - mean_x * mean_y) / spread
            fixed = mean_y - slope * mean_x
            if slope > 0 and fixed >= 0:
                return fixed + slope * size
        return mean_y * size / mean_x if size > mean_x else mean_y  # one size, or noise: smaller is no faster


@dataclass(slots=True)
class Pace:
    """The measured speeds of one model on one engine with one kind of settings."""

    prefill: Speed = field(default_factory=lambda: Speed(START_PREFILL))
    restoring: Line = field(default_factory=lambda: Line(START_RESTORE))
    saving: Line = field(default_factory=lambda: Line(START_SAVE))
    _skips: int = 0

    def figures(self) -> dict[str, list[float]]:
        """What was measured, as plain numbers; `remembered` reads them."""
        return {
            "prefill": self.prefill.figures(),
            "restoring": self.restoring.figures(),
            "saving": self.saving.figures(),
        }

    @classmethod
    def remembered(cls, figures: Mapping[str, Sequence[float]]) -> Pace:
        """The pace with these `figures`; ValueError where they cannot be measurements."""
        if set(figures) != {"prefill", "restoring", "saving"}:
            raise ValueError(f"a pace has prefill, restoring and saving, not {', '.join(sorted(figures))[:80]}")
        pace = cls()
        for name, numbers in figures.items():
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise ValueError(f"the figures of {name} are not all 0 or more")
        pace.prefill.recall(figures["prefill"])
        pace.restoring.recall(figures["restoring"])
        pace.saving.recall(figures["saving"])
        return pace

    def prefilled(self, tokens: int, seconds: float) -> None:
        """A prompt of so many computed tokens took so long."""
        self.prefill.observe(tokens, seconds, tokens / FULL_PREFILL)

    def restored(self, size: int, seconds: float) -> None:
        """A restore took so long, from opening the file to the engine's answer."""
        self.restoring.observe(size, seconds)

    def saved(self, size: int, seconds: float) -> None:
        """A save held the engine up for so long; what is done with the file afterwards holds nobody up."""
        self.saving.observe(size, seconds)

    def can_restore(self, tokens: int, size: int) -> Verdict:
        """Tell whether restoring ``size`` bytes beats computing ``tokens`` tokens (those that would be used)."""
        saves, words = self._compare(tokens, size)
        if saves > 0:
            return Verdict(True, words, saves)
        if self._skips >= TRY_AGAIN:
            return Verdict(True, f"{words}; tried once more to measure", saves)
        return Verdict(False, f"not worth it: {words}", saves)

    def decided(self, verdict: Verdict) -> None:
        """Count what was made of `can_restore`; call it once per request that the verdict was acted upon."""
        self._skips = 0 if verdict.pays else self._skips + 1

    def can_save(self, tokens: int, size: int, bound: float | None) -> Verdict:
        """Tell whether a snapshot of ``size`` bytes would pay, and can be written within ``bound`` seconds."""
        saves, words = self._compare(tokens, size)
        if saves <= 0:
            return Verdict(False, f"not worth it: {words}", saves)
        writing = self.saving.seconds(size)
        words = f"saving {tokens} tokens ({format_bytes(size)}) takes {format_duration(writing)}"
        if bound is not None and writing > bound:
            return Verdict(False, f"{words}, the bound is {format_duration(bound)}", saves)
        return Verdict(True, f"{words}, and saves {format_duration(saves)} of the next turn", saves)

    def _compare(self, tokens: int, size: int) -> tuple[float, str]:
        """Seconds that a restore saves, and the comparison in words."""
        computing, reading = tokens / self.prefill.value, self.restoring.seconds(size)
        words = (
            f"restoring {tokens} tokens ({format_bytes(size)}) takes {format_duration(reading)}, "
            f"computing them {format_duration(computing)} at {self.prefill.value:.0f} tokens/s"
        )
        if not (self.prefill.measured and self.restoring.measured):
            words += " (not all measured yet)"
        return computing - reading, words
