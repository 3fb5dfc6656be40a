"""How fast a disk gives weights, and in which way it does so best: measured on the files themselves, never assumed."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

from pagein.errors import WeightsUnreadable
from pagein.memory.buffers import Buffer
from pagein.weights.reading.files import PAGE, WeightFile
from pagein.weights.reading.files import ReadMode as ReadMode
from pagein.weights.reading.reader import CHUNK, Extent, Reader

_MIB = 1024 * 1024
BUFFER = 32 * _MIB
"""Bytes of the buffer that measurements read into, again and again: its pages are there from the first time on."""
_LONGEST = 1.0
"""Seconds after which a probe's measurement of a slow disk asks for no further bytes."""
_SLOW = 100e6
"""Bytes per second; a slower disk is not asked for more, as every further setting would keep its user waiting."""
_CLEARLY = 1.3
"""How much faster a setting has to be than the one before, which costs less CPU and memory, to be taken instead."""
_IN_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Setting:
    """One way of reading."""

    mode: ReadMode
    threads: int
    chunk: int = CHUNK


SETTINGS = (
    Setting(ReadMode.DIRECT, 4),
    Setting(ReadMode.DIRECT, 16, CHUNK // 4),
    Setting(ReadMode.BUFFERED, 1),
    Setting(ReadMode.BUFFERED, 16, CHUNK // 4),
)
"""What a probe tries, cheapest first in CPU time per byte. Sixteen threads are for disks behind a network."""


class Measured(NamedTuple):
    """What one way of reading gave, and took."""

    bps: float
    """Bytes per second."""
    cpu: float
    """Seconds of processor time per 10^9 bytes, of the whole process."""


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """What was measured, and what was chosen by it."""

    mode: ReadMode
    bytes_per_second: float
    direct_bps: float | None
    """Of the chosen setting, or else the best direct one; None where they are refused or there is no disk."""
    buffered_bps: float | None
    threads: int
    chunk: int
    why: str


def probe(files: Sequence[Path], budget_bytes: int = 256 * _MIB) -> DiskSpeed:
    """Read cold parts of the files in each way, at most so many bytes in all, and choose the way for `Reader`.

    Blocks for a fraction of a second on a fast disk and a few seconds on a slow one. Raises WeightsUnreadable.
    """
    assert files
    kind = file_system(files[0])
    share = max(PAGE, budget_bytes // (len(SETTINGS) + 1) // PAGE * PAGE)
    settings = [s for s in SETTINGS if kind not in _IN_MEMORY or s.mode is ReadMode.BUFFERED]
    found: dict[Setting, Measured] = {}
    buffer = Buffer(BUFFER)
    try:
        # Wakes a sleeping disk and touches the buffer; what that takes does not count.
        measure(files, settings[0], buffer, min(share, BUFFER), 0.0)
        for number, setting in enumerate(settings, 1):
            if found and max(found.values()).bps < _SLOW and setting.threads > 1:
                continue
            if not found and setting.mode is ReadMode.BUFFERED:
                share = max(share, budget_bytes // 4)  # without direct reads; the kernel's read-ahead starts slowly
            measured = measure(files, setting, buffer, share, number / (len(settings) + 1))
            if measured is not None:
                found[setting] = measured
    finally:
        buffer.close()
    return choose(found, kind)


def choose(found: Mapping[Setting, Measured], kind: str | None) -> DiskSpeed:
    """Take the first of the settings, which is the cheapest, unless a later one is clearly faster."""
    chosen = next(iter(found))
    best: dict[ReadMode, Measured] = {}
    for setting, measured in found.items():
        if measured.bps > _CLEARLY * found[chosen].bps:
            chosen = setting
        best[setting.mode] = max(measured, best.get(setting.mode, measured))
    best[chosen.mode] = found[chosen]
    direct, buffered = best.get(ReadMode.DIRECT), best.get(ReadMode.BUFFERED)
    why = _why(chosen.mode, direct, buffered, kind)
    speeds = direct and direct.bps, buffered and buffered.bps
    return DiskSpeed(chosen.mode, found[chosen].bps, *speeds, chosen.threads, chosen.chunk, why)


def measure(
    files: Sequence[Path], setting: Setting, buffer: Buffer, nbytes: int, start: float, longest: float = _LONGEST
) -> Measured | None:
    """Read so many bytes cold, from a place of the files (0 to 1) on, into the buffer again and again.

    None where the file system refuses direct reads. Stops early on a slow disk. Raises WeightsUnreadable.
    """
    extents = list(_places(files, nbytes, start, setting.chunk))
    for extent in extents:
        _drop(extent)
    with Reader(setting.mode, setting.threads, setting.chunk) as reader:
        before = process_time()
        _read_all(reader, extents, buffer, longest)
        cpu, stats = process_time() - before, reader.stats
        if setting.mode is ReadMode.DIRECT and not reader.direct(extents[0].file):
            return None
    return Measured(stats.bytes / stats.seconds, cpu / stats.bytes * 1e9)


def _read_all(reader: Reader, extents: list[Extent], buffer: Buffer, longest: float) -> None:
    """Keep every thread busy, without asking for more once the time is over."""
    ahead = deque(reader.read([extent], buffer) for extent in extents[: reader.threads + 2])
    end = perf_counter() + longest
    for extent in extents[reader.threads + 2 :]:
        ahead.popleft().wait()
        if perf_counter() > end:
            break
        ahead.append(reader.read([extent], buffer))
    for reading in ahead:
        reading.wait()


def _places(files: Sequence[Path], nbytes: int, start: float, chunk: int) -> Iterator[Extent]:
    """Cut a stretch of the files, laid end to end and round again, into chunks."""
    sizes = [(file, file.stat().st_size) for file in files]
    total = sum(size for _, size in sizes)
    if total == 0:
        raise WeightsUnreadable(files[0], "is empty, so that its disk cannot be measured")
    skip, left, into = int(total * start), min(nbytes, total), 0
    while left > 0:
        for file, size in sizes:
            if skip >= size:
                skip -= size
                continue
            for offset in range(skip // PAGE * PAGE, size, chunk):
                if left <= 0:
                    return
                length = -(-min(chunk, size - offset, left) // PAGE) * PAGE
                yield Extent(file, offset, length, into)
                left, into = left - length, (into + chunk) % BUFFER  # several share a place: nobody looks at it
            skip = 0


def _drop(extent: Extent) -> None:
    file = WeightFile(extent.file, ReadMode.BUFFERED)
    try:
        file.settle()
        file.drop(extent.offset, extent.nbytes)
    finally:
        file.close()


def _why(mode: ReadMode, direct: Measured | None, buffered: Measured | None, kind: str | None) -> str:
    where = kind or "this file system"
    if direct is None and kind in _IN_MEMORY:
        return f"{where} keeps files in memory: there is no disk to read past the page cache"
    if direct is None:
        return f"{where} refuses direct reads (O_DIRECT)"
    if buffered is None:
        return f"direct reads give {rate(direct.bps)} on {where}"
    faster = "is slower" if buffered.bps < direct.bps else "is not clearly faster, and takes memory"
    faster = "is clearly faster" if mode is ReadMode.BUFFERED else faster
    return (
        f"on {where} direct reads give {rate(direct.bps)} for {direct.cpu:.2g} s of processor time per GB; "
        f"the page cache gives {rate(buffered.bps)} for {buffered.cpu:.2g} s and {faster}"
    )


def rate(bps: float) -> str:
    """Print bytes per second as data sheets of disks do: in 10^9 or 10^6 bytes."""
    return f"{bps / 1e9:.2f} GB/s" if bps >= 1e8 else f"{bps / 1e6:.3g} MB/s"


def file_system(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str | None:
    """Return the type of the file system that a path lies on (ext4, nfs4, fuse.sshfs, …); None where unknown."""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return None
    real, best, kind = path.resolve(), -1, None
    for line in lines:
        fields = line.split()
        if "-" not in fields[6:-1]:
            continue
        point = Path(re.sub(r"\\([0-7]{3})", lambda m: chr(int(m.group(1), 8)), fields[4]))
        if real.is_relative_to(point) and len(point.parts) >= best:  # of two at one place the later is on top
            best, kind = len(point.parts), fields[fields.index("-", 6) + 1]
    return kind
