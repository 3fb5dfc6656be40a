"""Numbers out of samples."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

__all__ = ["median", "percentile"]


def percentile(samples: Sequence[float], share: float) -> float:
    """The sample below which that share of all lies (nearest rank)."""
    ordered = sorted(samples)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
