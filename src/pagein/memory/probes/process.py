"""What a process with all its descendants takes: proportional set size, peak, GPU bytes.

Asked for every worker at each sample, so one pass over the process table serves all of them. Processes come and
go while they are read: whatever is gone counts nothing, and nothing here raises.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from pagein.memory.probes import darwin, nvidia
from pagein.memory.snapshot import TreeReading

_PROC = Path("/proc")

GpuUse = Mapping[str, Mapping[int, int | None]]
"""Pool → process → bytes."""


@dataclass(frozen=True, slots=True)
class Kin:
    """How a process is related to others."""

    parent: int
    group: int
    session: int
    dead: bool
    """A zombie: it holds no memory any more, only its number."""


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Memory of one process, in bytes."""

    rss: int
    pss: int
    peak: int
    mapped: int | None = None
    """Of ``pss``, the pages of files that are not locked in memory; None where the kernel does not tell."""


@dataclass(frozen=True, slots=True)
class _Known:
    """An earlier reading, the resident size at that time as ``status`` gives it, and how many samples ago it was."""

    reading: ProcessReading
    status_rss: int
    age: int


class TreeSampler:
    """Reads the same trees again and again, and walks page tables only where something moved.

    PSS costs the kernel a walk over every page: 7 ms per GiB of 4 KiB pages. Resident size and peak cost nothing. So
    a process whose resident size stayed nearly the same keeps its PSS; growth counts in full at once; every process is
    walked anew at each `EVERY`-th sample, since sharing changes without it. Not for use by two threads at once.
    """

    EVERY = 20
    """Samples after which sharing is measured anew: 10 s at the default pace."""
    SLACK = 8 * 1024**2
    """Bytes that the resident size may move by (or a 64th of it, if that is less) before the next walk."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}

    def sample(self, pids: Iterable[int]) -> dict[int, TreeReading | None]:
        """Return the memory of each tree, or None for one of which nothing is left."""
        last, self._known = self._known, {}
        return _read_trees(pids, lambda pid: self._read(pid, last.get(pid)))

    def _read(self, pid: int, known: _Known | None) -> ProcessReading | None:
        if known is not None and known.age < self.EVERY:
            rss, peak = _status(pid)
            if rss is None:
                return None
            moved = rss - known.status_rss
            if abs(moved) <= min(self.SLACK, known.status_rss // 64):
                self._known[pid] = replace(known, age=known.age + 1)
                grown = max(0, moved)
                held = known.reading
                highest = max(held.peak, peak or 0, held.rss + grown)
                return replace(held, rss=held.rss + grown, pss=held.pss + grown, peak=highest)
        # The first age differs by process, so that not all are walked at the same sample.
        return self._walk(pid, 0 if known is not None else pid % self.EVERY)

    def _walk(self, pid: int, age: int) -> ProcessReading | None:
        reading, (rss, _) = read_process(pid), _status(pid)
        if reading is not None and rss is not None:
            self._known[pid] = _Known(reading, rss, age)
        return reading


def read_tree(pid: int) -> TreeReading | None:
    """Return the memory of a process and its descendants, or None when none of them is left."""
    return read_trees((pid,))[pid]


def read_trees(pids: Iterable[int]) -> dict[int, TreeReading | None]:
    """Return the memory of several trees, all of it measured now; `TreeSampler` is cheaper for repeated readings."""
    return _read_trees(pids, read_process)


def pss_of(pid: int) -> int | None:
    """Return the proportional set size of one process without its children, or None when it is gone."""
    reading = _read_darwin(pid) if sys.platform == "darwin" else read_process(pid)
    return None if reading is None else reading.pss


def parse_stat(text: bytes) -> Kin | None:
    """Return the relations in ``/proc/PID/stat``; the program's name may hold blanks and brackets."""
    fields = text[text.rfind(b")") + 2 :].split(maxsplit=4)
    if len(fields) < 4 or not text:
        return None
    return Kin(int(fields[1]), int(fields[2]), int(fields[3]), fields[0] in (b"Z", b"X"))


def read_kinship(proc: Path = _PROC) -> dict[int, Kin]:
    """Return every visible process with its relations."""
    kinship = {}
    try:
        entries = os.listdir(proc)
    except OSError:
        return {}
    for entry in entries:
        if entry.isdigit():
            kin = parse_stat(_read(f"{proc}/{entry}/stat") or b"")
            if kin is not None:
                kinship[int(entry)] = kin
    return kinship


def members(kinship: Mapping[int, Kin], pid: int) -> list[int]:
    """Return the living processes of a tree: the process, its descendants, and what is left of its session or group.

    A child whose parent ended is handed to init and is no descendant any more; it still holds memory, and the session
    that the supervisor made for the worker still names it.
    """
    children: dict[int, list[int]] = {}
    found = {pid} & kinship.keys()
    for other, kin in kinship.items():
        children.setdefault(kin.parent, []).append(other)
        if pid in (kin.group, kin.session):
            found.add(other)
    ahead = list(found)
    while ahead:
        fresh = [child for child in children.get(ahead.pop(), ()) if child not in found]
        found.update(fresh)
        ahead.extend(fresh)
    return sorted(member for member in found if not kinship[member].dead)


def parse_sizes(text: bytes, *names: bytes) -> list[int | None]:
    """Return the bytes of ``Name:  123 kB`` lines of ``/proc/PID/smaps_rollup`` or ``status``; None where missing."""
    sizes = dict.fromkeys(names)
    for line in text.split(b"\n"):
        name, _, rest = line.partition(b":")
        if name in sizes:
            words = rest.split()
            sizes[name] = int(words[0]) * 1024 if words and words[0].isdigit() else None
    return list(sizes.values())


def read_process(pid: int, proc: Path = _PROC) -> ProcessReading | None:
    """Return what one process takes, or None when it is gone (or is a kernel thread or zombie, which take nothing).

    Without smaps_rollup (kernels before 4.14, another user's process) shared pages count in full: RSS stands for PSS.
    """
    status_rss, peak = _status(pid, proc)
    names = (b"Rss", b"Pss", b"Pss_File", b"Locked")
    rss, pss, files, locked = parse_sizes(_read(f"{proc}/{pid}/smaps_rollup") or b"", *names)
    rss = status_rss if rss is None else rss
    if rss is None:
        return None
    mapped = None if files is None else max(0, files - (locked or 0))
    return ProcessReading(rss=rss, pss=rss if pss is None else pss, peak=max(rss, peak or 0), mapped=mapped)


def _status(pid: int, proc: Path = _PROC) -> tuple[int | None, int | None]:
    """Resident size and its peak: counters of the kernel, read without a walk."""
    rss, peak = parse_sizes(_read(f"{proc}/{pid}/status") or b"", b"VmRSS", b"VmHWM")
    return rss, peak


def _read_trees(pids: Iterable[int], read: Callable[[int], ProcessReading | None]) -> dict[int, TreeReading | None]:
    devices = _devices()
    gpu = nvidia.process_bytes(nvidia.open_nvml(), devices) if devices else {}
    shared = frozenset(device.pool for device in devices if device.unified)
    if sys.platform == "darwin":
        return {pid: _sum({p: _read_darwin(p) for p in _members_darwin(pid)}, gpu, shared) for pid in pids}
    kinship = read_kinship()
    return {pid: _sum({p: read(p) for p in members(kinship, pid)}, gpu, shared) for pid in pids}


def _sum(readings: Mapping[int, ProcessReading | None], gpu: GpuUse, shared: frozenset[str]) -> TreeReading | None:
    """Add up a tree; ``shared`` names the GPUs that use the machine's own memory, whose bytes are RAM."""
    there = {pid: reading for pid, reading in readings.items() if reading is not None}
    if not there:
        return None
    ram = sum(reading.pss for reading in there.values())
    twice = sum(reading.rss for reading in there.values()) - ram
    peak = max(ram, sum(reading.peak for reading in there.values()) - twice)
    on_gpu = _gpu_of(there, gpu)
    # Device allocations of an integrated GPU are in no process's resident set.
    extra = sum(size for pool, size in on_gpu.items() if pool in shared)
    own = {pool: size for pool, size in on_gpu.items() if pool not in shared}
    mapped = [reading.mapped for reading in there.values() if reading.mapped is not None]
    return TreeReading(tuple(there), ram + extra, peak + extra, own, sum(mapped) if mapped else None)


def _gpu_of(pids: Iterable[int], gpu: GpuUse) -> dict[str, int]:
    """Bytes per pool; a pool where one process's share is unknown is left out rather than told too small."""
    sums = {}
    for pool, used in gpu.items():
        sizes = [used[pid] for pid in pids if pid in used]
        known = [size for size in sizes if size is not None]
        if known and len(known) == len(sizes):
            sums[pool] = sum(known)
    return sums


@functools.cache
def _devices() -> tuple[nvidia.GpuDevice, ...]:
    """The GPUs, asked once: only their handles matter here, and those stay."""
    return tuple(nvidia.read_here())


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except OSError:  # gone, or not ours
        return None


def _members_darwin(pid: int) -> list[int]:
    try:
        return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    except psutil.Error:
        return []


def _read_darwin(pid: int) -> ProcessReading | None:
    found = darwin.footprint(pid)
    if found is not None:
        return ProcessReading(rss=found[0], pss=found[0], peak=found[1])
    try:
        rss = psutil.Process(pid).memory_info().rss
    except psutil.Error:
        return None
    return ProcessReading(rss=rss, pss=rss, peak=rss)
