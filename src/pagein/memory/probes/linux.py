"""What Linux says about the whole machine: ``/proc/meminfo``, ``vmstat``, ``buddyinfo``, ``swaps``, PSI."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pagein.memory.snapshot import Pressure


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of the machine (or virtual machine) as its kernel counts them; unknown is None."""

    total: int | None
    available: int | None
    swap_total: int | None
    swap_used: int | None
    swapped_in: int | None
    wsl: bool = False
    """True inside a WSL2 virtual machine, whose memory is a share of the Windows host's."""
    swapped_out: int | None = None


@dataclass(frozen=True, slots=True)
class FreeBlocks:
    """Free memory by how much of it stands together."""

    free: int
    large: int
    """Bytes of it in blocks of at least the size asked for."""

    @property
    def scattered(self) -> float:
        """Share of the free memory that is no use for such a block, 0 to 1: the kernel's unusable index."""
        return 1 - self.large / self.free if self.free else 1.0


@lru_cache(maxsize=256)
def path_in(folder: Path, name: str) -> Path:
    """Return a path below a folder, the same object each time.

    `pathlib` interns each part of a new path, and Python's table of interned strings keeps a slot for those that are
    gone: paths that were made anew for each sample would let a daemon grow by a megabyte per hour.
    """
    return folder / name


def read_text(path: Path) -> str | None:
    """Return a small text file, or None where it is missing, unreadable or vanishes while it is read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def parse_meminfo(text: str) -> dict[str, int]:
    """Return the sizes of ``/proc/meminfo`` in bytes; lines that are no size in kB are left out."""
    sizes = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            sizes[name.strip()] = int(words[0]) * 1024
    return sizes


def parse_counters(text: str) -> dict[str, int]:
    """Return the ``name number`` lines of ``/proc/vmstat`` or of a cgroup's ``memory.stat``."""
    counters = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) == 2 and words[1].isdigit():
            counters[words[0]] = int(words[1])
    return counters


def parse_buddyinfo(text: str, block: int, page: int) -> FreeBlocks | None:
    """Return the free memory of all zones in ``/proc/buddyinfo``, and what of it stands in blocks of ``block`` bytes.

    Its columns count free blocks of 1, 2, 4, … pages. None where no line can be read.
    """
    free = large = 0
    for line in text.splitlines():
        _, zone, columns = line.partition("zone")
        counts = columns.split()[1:]
        if not zone or not counts or not all(count.isdigit() for count in counts):
            continue
        for order, count in enumerate(counts):
            size = page << order
            free += int(count) * size
            large += int(count) * size if size >= block else 0
    return FreeBlocks(free, large) if free else None


def parse_swaps(text: str) -> dict[str, int]:
    """Return the swap areas of ``/proc/swaps`` with their bytes."""
    rows = (line.split() for line in text.splitlines()[1:])
    return {row[0]: int(row[2]) * 1024 for row in rows if len(row) == 5 and row[2].isdigit()}


def parse_pressure(text: str) -> Pressure:
    """Return the ten-second averages of ``/proc/pressure/memory`` or of a cgroup's ``memory.pressure``."""
    averages: dict[str, float] = {}
    for line in text.splitlines():
        kind, *fields = line.split() or [""]
        for field in fields:
            name, _, value = field.partition("=")
            if name == "avg10":
                try:
                    averages[kind] = float(value)
                except ValueError:
                    continue
    return Pressure(some_avg10=averages.get("some"), full_avg10=averages.get("full"))


def read_pressure(path: Path) -> Pressure:
    """Return the stall shares of one PSI file; unknown where PSI is off (``psi=0``, kernels before 4.20)."""
    text = read_text(path)
    return Pressure() if text is None else parse_pressure(text)


def read_host(root: Path = Path("/")) -> HostMemory:
    """Return the machine's memory as read under ``root``; what the kernel does not say is None."""
    sizes = parse_meminfo(read_text(path_in(root, "proc/meminfo")) or "")
    counters = parse_counters(read_text(path_in(root, "proc/vmstat")) or "")
    swap_total, swap_free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    release = read_text(path_in(root, "proc/sys/kernel/osrelease")) or ""
    return HostMemory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        swap_total=swap_total,
        swap_used=None if swap_total is None or swap_free is None else swap_total - swap_free,
        swapped_in=_pages(counters.get("pswpin")),
        wsl="microsoft" in release.lower(),
        swapped_out=_pages(counters.get("pswpout")),
    )


def _pages(count: int | None) -> int | None:
    return None if count is None else count * os.sysconf("SC_PAGE_SIZE")
