"""What processes take: the proportional set size, so that a sum over a tree is what the machine really gives."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def pss_of(pid: int) -> int:
    """Bytes of one process; 0 where it has ended."""
    return _row_of(pid, "Pss:")


def anonymous_of(pid: int) -> int:
    """Bytes that are the process's own whatever others map: what grows when it keeps more and more."""
    return _row_of(pid, "Anonymous:")


def _row_of(pid: int, name: str) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return 0


def pss_of_tree(pid: int) -> int:
    """Bytes of a process and everything below it."""
    try:
        below = psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return 0
    return pss_of(pid) + sum(pss_of(process.pid) for process in below)
