"""What Linux says about the memory of the whole machine: ``/proc/meminfo``, ``/proc/vmstat``, PSI."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
    sizes = parse_meminfo(read_text(root / "proc/meminfo") or "")
    counters = parse_counters(read_text(root / "proc/vmstat") or "")
    swap_total, swap_free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    pages_in = counters.get("pswpin")
    release = read_text(root / "proc/sys/kernel/osrelease") or ""
    return HostMemory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        swap_total=swap_total,
        swap_used=None if swap_total is None or swap_free is None else swap_total - swap_free,
        swapped_in=None if pages_in is None else pages_in * os.sysconf("SC_PAGE_SIZE"),
        wsl="microsoft" in release.lower(),
    )
