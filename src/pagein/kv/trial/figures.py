"""What was served, in figures. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Served:
    """One turn. Times in seconds."""

    user: int
    turn: int
    service: float
    """From the begin of its own work to its last token."""
    latency: float
    """As its user saw it: from the end of the user's turn before to the last token; of a first turn from the start of
    the load, of a second from the moment at which all first ones were answered."""
    computed: int
    """Tokens of the prompt that were not reused."""
    answered: int
    """Tokens that were generated."""
    failure: str | None = None
    first: float | None = None
    """From the begin of its own work to its first token; None where the way does not tell."""


def percentile(samples: Sequence[float], percent: float) -> float | None:
    """Return the sample that so many percent of all do not pass (nearest rank); None without samples."""
    if not samples:
        return None
    ordered = sorted(samples)
    rank = -(-len(ordered) * percent // 100)
    return ordered[min(len(ordered), max(1, int(rank))) - 1]


def summarise(served: Sequence[Served], *, first_turn: int = 0) -> dict[str, Any]:
    """Return the figures of the turns from one on: counts, tokens per second, seconds by percentile.

    ``tokens_per_second`` counts generated tokens over the time that all served turns took together; ``latency``,
    ``service`` and ``first`` are of turns that were answered. None where nothing was.
    """
    chosen = [one for one in served if one.turn >= first_turn]
    done = [one for one in chosen if one.failure is None]
    seconds = sum(one.service for one in done)
    reasons = sorted({one.failure for one in chosen if one.failure is not None})
    return {
        "turns": len(chosen),
        "failures": len(chosen) - len(done),
        "failure_reasons": reasons[:3],
        "answered_tokens": sum(one.answered for one in done),
        "computed_tokens": sum(one.computed for one in done),
        "seconds": seconds,
        "tokens_per_second": sum(one.answered for one in done) / seconds if seconds else None,
        "latency": _spread([one.latency for one in done]),
        "service": _spread([one.service for one in done]),
        "first": _spread([one.first for one in done if one.first is not None]),
    }


def _spread(samples: Sequence[float]) -> dict[str, float | None]:
    return {f"p{percent}": percentile(samples, percent) for percent in _PERCENTILES}
