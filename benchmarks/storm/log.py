"""What happened in a storm: the last events for the evidence, and the counts for the table."""

from __future__ import annotations

import time
from collections import Counter, deque

_KEPT = 400


class Log:
    """Events and violations; everything that a storm tells goes through here."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.events: deque[str] = deque(maxlen=_KEPT)
        self.counts: Counter[str] = Counter()
        self.violations: dict[str, list[str]] = {}

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def event(self, text: str) -> None:
        """Something happened."""
        self.events.append(f"{self.now:7.2f} {text}")

    def count(self, what: str, by: int = 1) -> None:
        """One more of these."""
        self.counts[what] += by

    def violation(self, rule: str, evidence: str) -> None:
        """A rule was broken."""
        self.violations.setdefault(rule, []).append(f"{self.now:.2f} s: {evidence}")
        self.event(f"VIOLATION {rule}: {evidence}")
