"""Where the limit of something lies above what it was granted."""

from __future__ import annotations

import math

LEAST_MARGIN = 64 * 1024**2
"""Bytes that every limit lies above its allowance at least: a limit also counts what no estimate sees, the page tables,
sockets and slabs that the kernel keeps for the worker and the file pages that it just reads."""


def end_at(allowance: int, margin: float) -> int:
    """Bytes at which a worker with this allowance is ended: allowance + max(64 MiB, margin).

    ``margin`` is ``supervisor.limit_margin``: an int counts bytes, a float is a share of the allowance.
    """
    return allowance + max(LEAST_MARGIN, margin if isinstance(margin, int) else math.ceil(allowance * margin))
