"""Where the kernel's limit of a worker lies."""

from __future__ import annotations

import os

from pagein.residency.margin import LEAST_MARGIN, end_at

__all__ = ["LEAST_MARGIN", "limit_for"]


def limit_for(allowance: int, margin: float) -> int:
    """Return the hard limit in bytes for an allowance of RAM in bytes: `end_at`, in whole pages."""
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-end_at(allowance, margin) // page) * page
