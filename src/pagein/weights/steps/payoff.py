"""Whether guessing ahead pays: measured seconds a pass and tokens accepted, against plain decoding. Pure.

With a chance p that a guess is right, k guesses give E(k) = 1 + p + … + p^k tokens a pass (Leviathan et al. 2023,
arXiv:2211.17192, equation 1). Guessing goes on while E(k) ÷ seconds(k + 1 positions) beats 1 ÷ seconds(1 position).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

FEWEST, MOST = 2, 16
"""Guesses for one pass: how far their number adapts."""
FIRST = 4
"""Guesses for one pass while nothing is known about them."""
PLAIN_FIRST = 2
"""Plain passes that are measured before the first guess; the first of them still warms up."""
TRIALS = 3
"""Passes with guesses before there is a verdict."""
GAIN_ON = 1.05
"""Gain that switches guessing on again; it goes off below 1, so that noise does not toggle it."""
NEWEST = 0.3
"""Weight of the newest measurement of seconds."""
FADE = 0.85
"""What older guesses count for after each pass with guesses."""
PLAIN_EVERY = 64
"""Passes with guesses after which a plain one is measured again: a pass grows with the text."""
PROBE_FIRST, PROBE_LAST = 32, 512
"""Plain passes before guessing is tried again; doubled each time that it loses."""


@dataclass(slots=True)
class Totals:
    """What speculation did since the start."""

    passes: int = 0
    guessed_passes: int = 0
    proposed: int = 0
    accepted: int = 0

    @property
    def tokens_per_pass(self) -> float | None:
        """Tokens that one pass gave on average, plain ones included."""
        return (self.passes + self.accepted) / self.passes if self.passes else None


class Payoff:
    """What one kind of guesses is worth on one model."""

    def __init__(self) -> None:
        self.totals = Totals()
        self.stopped: str | None = None
        """Why this model cannot be guessed for at all."""
        self.forget()

    def forget(self) -> None:
        """Measure anew, because passes cost something else from now on; the totals stay."""
        self.is_on = True
        self._seconds: dict[int, float] = {}
        self._right, self._tried = 1.0, 2.0
        self._plain = self._trials = self._since_plain = self._since_probe = 0
        self._probe_after = PROBE_FIRST

    def wanted(self, most: int) -> int:
        """How many tokens to guess for the next pass, at most so many; 0: none."""
        if self.stopped is not None or self._plain < PLAIN_FIRST or self._since_plain >= PLAIN_EVERY:
            return 0
        if not self.is_on:
            return min(FIRST, most) if self._since_probe >= self._probe_after else 0
        return min(FIRST if self._trials < TRIALS else self._best()[0], most)

    def saw_plain(self, seconds: float) -> None:
        """Take in a pass of one position."""
        self.totals.passes += 1
        self._plain += 1
        self._since_plain = 0
        self._since_probe += 1
        # The first pass also pays for what is done once: it counts only until there is a second one.
        self._learn(1, seconds, fresh=self._plain <= PLAIN_FIRST)

    def saw(self, seconds: float, proposed: int, accepted: int, rejected: bool) -> None:
        """Take in a pass of ``proposed + 1`` positions; guesses after the last accepted one may be unread."""
        self.totals.passes += 1
        self.totals.guessed_passes += 1
        self.totals.proposed += proposed
        self.totals.accepted += accepted
        self._since_plain += 1
        self._trials += 1
        self._right = self._right * FADE + accepted
        self._tried = self._tried * FADE + accepted + rejected
        self._learn(proposed + 1, seconds)
        self._judge()

    def _learn(self, positions: int, seconds: float, fresh: bool = False) -> None:
        before = self._seconds.get(positions)
        if before is None or fresh:
            self._seconds[positions] = seconds
        else:
            self._seconds[positions] = before + NEWEST * (seconds - before)

    def _judge(self) -> None:
        if self._trials < TRIALS:
            return
        was, gain = self.is_on, self._best()[1]
        self.is_on = gain >= (1.0 if was else GAIN_ON)
        if self.is_on:
            self._probe_after = PROBE_FIRST
        else:
            self._probe_after = PROBE_FIRST if was else min(2 * self._probe_after, PROBE_LAST)
            self._since_probe = 0

    def _best(self) -> tuple[int, float]:
        """The number of guesses that gains most, and the tokens a second that it gives over those of plain decoding."""
        return max(((count, self._gain(count)) for count in range(FEWEST, MOST + 1)), key=lambda one: one[1])

    def _gain(self, guesses: int) -> float:
        right = self._right / self._tried if self._tried else 0.0
        tokens = sum(right**place for place in range(guesses + 1))
        return tokens * self._cost(1) / max(self._cost(guesses + 1), 1e-9)

    def _cost(self, positions: int) -> float:
        """Seconds of a pass: as measured, or on the line between two measured ones, or through the outer two."""
        points = sorted(self._seconds.items())
        if len(points) == 1:
            return points[0][1]
        for (left, low), (right, high) in pairwise(points):
            if positions <= right:
                return low + (high - low) * (positions - left) / (right - left)
        (left, low), (right, high) = points[0], points[-1]
        return high + max(high - low, 0.0) * (positions - right) / (right - left)

    @property
    def why(self) -> str:
        """Say whether guesses are made, and the figures behind it."""
        if self.stopped is not None:
            return f"off: {self.stopped}"
        if self._plain < PLAIN_FIRST or self._trials < TRIALS:
            return f"on, not judged yet: {min(self._trials, TRIALS)} of {TRIALS} passes with guesses measured"
        guesses, gain = self._best()
        cost = self._cost(guesses + 1) / max(self._cost(1), 1e-9)
        figures = (
            f"{guesses} guesses a pass cost {cost:.2f} times a plain pass and give {gain * cost:.2f} tokens: "
            f"{gain:.2f} times plain decoding"
        )
        if self.is_on:
            return f"on: {figures}"
        return f"off: {figures}; tried again after {self._probe_after} passes"

    def line(self) -> str:
        """Say what was proposed, what was accepted, and what became of it."""
        totals, mean = self.totals, self.totals.tokens_per_pass
        counted = f"{totals.proposed} proposed, {totals.accepted} accepted"
        return f"{counted}, {mean:.2f} tokens a pass; {self.why}" if mean is not None else f"{counted}; {self.why}"
