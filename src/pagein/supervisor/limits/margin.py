"""Where a worker's limit lies above what it was granted."""

from __future__ import annotations

import math
import os

LEAST_MARGIN = 64 * 1024**2
"""Bytes that every limit lies above its allowance at least: a limit also counts what no estimate sees, the page tables,
sockets and slabs that the kernel keeps for the worker and the file pages that it just reads."""


def limit_for(allowance: int, margin: float) -> int:
    """Return the hard limit in bytes for an allowance of RAM in bytes: allowance + max(64 MiB, margin), whole pages.

    ``margin`` is ``supervisor.limit_margin``: an int counts bytes, a float is a share of the allowance.
    """
    extra = margin if isinstance(margin, int) else math.ceil(allowance * margin)
    page = os.sysconf("SC_PAGE_SIZE")
    return -(-(allowance + max(LEAST_MARGIN, extra)) // page) * page
