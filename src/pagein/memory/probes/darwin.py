"""macOS: memory from ``sysctl`` and ``vm_stat``, and what a process takes from ``proc_pid_rusage``.

``proc_pid_rusage`` gives the physical footprint that Activity Monitor shows, Metal buffers included, for every
process of the same user. psutil's USS needs root there and can block for ever (psutil issue 2885).
"""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
from dataclasses import dataclass

from pagein.errors import PageinError
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure

_NAMES = ("hw.memsize", "hw.optional.arm64", "vm.swapusage", "kern.memorystatus_vm_pressure_level")
_WORDS = {"1": "normal", "2": "warn", "4": "critical"}
"""Levels of ``kern.memorystatus_vm_pressure_level`` (dispatch/source.h, DISPATCH_MEMORYPRESSURE_*)."""
_UNITS = {"K": 1024, "M": 1024**2, "G": 1024**3}

_RUSAGE_V4 = 4
_BUFFER = 1024
"""Bytes; larger than any rusage_info that a kernel writes (v4 has 296, newer ones more)."""
_FOOTPRINT, _PEAK = 16 + 7 * 8, 16 + 28 * 8
"""Offsets of ri_phys_footprint and ri_lifetime_max_phys_footprint in rusage_info_v4 (sys/resource.h)."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Bytes of swap in use and in all."""

    total: int
    used: int


def parse_sysctl(text: str) -> dict[str, str]:
    """Return the ``name: value`` lines of ``sysctl``."""
    lines = (line.partition(": ") for line in text.splitlines())
    return {name: value.strip() for name, separator, value in lines if separator}


def parse_swap(text: str) -> Swap | None:
    """Return the sizes of ``vm.swapusage``: ``total = 2048.00M  used = 1034.25M  free = 1013.75M``."""
    found = re.findall(r"(\w+) = ([\d.]+)([KMG])", text)
    sizes = {name: int(float(number) * _UNITS[unit]) for name, number, unit in found}
    return Swap(sizes["total"], sizes["used"]) if {"total", "used"} <= sizes.keys() else None


def parse_vm_stat(text: str) -> dict[str, int]:
    """Return the counters of ``vm_stat`` in bytes; empty where the page size is not given."""
    page = re.search(r"page size of (\d+) bytes", text)
    if page is None:
        return {}
    size = int(page.group(1))
    counters = re.findall(r'^"?([^:"\n]+)"?:\s+(\d+)\.$', text, re.MULTILINE)
    return {name: int(count) * size for name, count in counters}


def available_bytes(counters: dict[str, int]) -> int | None:
    """Return free pages, file cache and purgeable memory; anonymous and compressed memory counts as used.

    Speculative pages stand inside the file-backed ones; psutil's "available" takes inactive anonymous pages for free.
    """
    parts = [counters.get(name) for name in ("Pages free", "File-backed pages", "Pages purgeable")]
    known = [part for part in parts if part is not None]
    return sum(known) if len(known) == len(parts) else None


def snapshot_from(sysctl: str, vm_stat: str) -> MachineSnapshot:
    """Return the machine from the texts of the two commands; raises PageinError without a memory size."""
    values, counters = parse_sysctl(sysctl), parse_vm_stat(vm_stat)
    size = values.get("hw.memsize", "")
    if not size.isdigit():
        raise PageinError("cannot tell how much memory this Mac has: sysctl gives no hw.memsize")
    swap = parse_swap(values.get("vm.swapusage", ""))
    return MachineSnapshot(
        pools={"ram": PoolReading("ram", int(size), available_bytes(counters), "physical memory")},
        unified=values.get("hw.optional.arm64") == "1",
        swap_total=None if swap is None else swap.total,
        swap_used=None if swap is None else swap.used,
        pressure=Pressure(word=_WORDS.get(values.get("kern.memorystatus_vm_pressure_level", ""))),
        swapped_in=counters.get("Swapins"),
        swapped_out=counters.get("Swapouts"),
    )


def read_machine() -> MachineSnapshot:
    """Ask this Mac; blocks for two short commands."""
    return snapshot_from(_output("sysctl", *_NAMES), _output("vm_stat"))


def parse_rusage(buffer: bytes) -> tuple[int, int]:
    """Return footprint and peak footprint from a rusage_info_v4."""
    now: int
    peak: int
    (now,), (peak,) = struct.unpack_from("=Q", buffer, _FOOTPRINT), struct.unpack_from("=Q", buffer, _PEAK)
    return now, max(now, peak)


def footprint(pid: int) -> tuple[int, int] | None:
    """Return the bytes that a process takes now and took at most, or None where it is gone or another user's."""
    library = _libproc()
    if library is None:
        return None
    buffer = ctypes.create_string_buffer(_BUFFER)
    if library.proc_pid_rusage(pid, _RUSAGE_V4, ctypes.byref(buffer)) != 0:
        return None
    return parse_rusage(buffer.raw)


@functools.cache
def _libproc() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("/usr/lib/libproc.dylib", use_errno=True)
    except OSError:
        return None


def _output(*command: str) -> str:
    """Standard output of a command; empty where it is missing or hangs. An unknown sysctl name costs only its line."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
