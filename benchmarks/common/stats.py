"""Numbers out of samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["median", "percentile", "quartiles"]


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which that share of all lies (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def quartiles(samples: Sequence[float]) -> list[float]:
    """A quarter, half and three quarters of the samples lie below."""
    return [percentile(samples, share) for share in (0.25, 0.5, 0.75)]
