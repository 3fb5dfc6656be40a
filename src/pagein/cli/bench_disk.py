"""``pagein bench disk``: one path read in several ways, and the way that Pagein takes."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import mkstemp

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from pagein.cli.console import errors, print_json, show
from pagein.errors import BadUsage, DiskFull
from pagein.memory.buffers import Buffer
from pagein.units import format_bytes
from pagein.weights.reading.disk import (
    BUFFER,
    SETTINGS,
    DiskSpeed,
    Measured,
    ReadMode,
    Setting,
    choose,
    file_system,
    measure,
)
from pagein.weights.reading.reader import CHUNK

_MIB = 1024 * 1024
_LEAST_SIZE = 64 * _MIB
_LEAST_FILE = 64 * _MIB
"""Bytes from which a file counts as weights: smaller ones end before a disk is at its speed."""
_WEIGHTS = (".safetensors", ".gguf", ".onnx", ".onnx_data", ".bin", ".pt", ".pth")
_MOST_ENTRIES = 20_000
_LONGEST = 5.0
"""Seconds after which a setting on a slow disk counts as measured."""
_SPARE = 1024 * _MIB
"""Bytes that a temporary file leaves free on its disk."""

_WAYS = (
    Setting(ReadMode.DIRECT, 1),
    Setting(ReadMode.DIRECT, 4, CHUNK // 16),
    Setting(ReadMode.DIRECT, 4, CHUNK // 4),
    Setting(ReadMode.DIRECT, 4, CHUNK // 2),
    Setting(ReadMode.DIRECT, 4),
    Setting(ReadMode.DIRECT, 16, CHUNK // 4),
    Setting(ReadMode.BUFFERED, 1),
    Setting(ReadMode.BUFFERED, 4),
    Setting(ReadMode.BUFFERED, 16, CHUNK // 4),
)
"""What is measured, in this order; the choice is made among the settings that a probe tries."""


@dataclass(frozen=True, slots=True)
class _Subject:
    files: list[Path]
    note: str


def bench_disk(target: Path, each: int, json: bool) -> None:
    """Measure every way on one path and print them."""
    if each < _LEAST_SIZE:
        raise BadUsage(f"--size: {format_bytes(each)} are read too fast to be measured", hint="at least 64MiB")
    with _bar(hidden=json) as (progress, task), _subject(target, each, progress) as subject:
        kind = file_system(subject.files[0])
        found = _measure_all(subject.files, each, progress, task)
    chosen = choose({s: m for s in SETTINGS if (m := found[s]) is not None}, kind)
    if json:
        print_json(_document(target, kind, subject, each, found, chosen))
        return
    show(Text(f"{target}: {subject.note}, on {kind or 'an unknown file system'}"))
    show(Text())
    show(_table(found, chosen))
    show(Text())
    show(Text(f"Pagein takes {_told(chosen)}: {chosen.why}."))


def _measure_all(files: list[Path], each: int, progress: Progress, task: TaskID) -> dict[Setting, Measured | None]:
    found: dict[Setting, Measured | None] = {}
    buffer = Buffer(BUFFER)
    try:
        measure(files, Setting(ReadMode.BUFFERED, 1), buffer, BUFFER, 0.99)  # wakes the disk, touches the buffer
        for number, way in enumerate(_WAYS):
            progress.update(task, description=f"{way.mode}, {way.threads} × {format_bytes(way.chunk)}")
            found[way] = measure(files, way, buffer, each, number / len(_WAYS), _LONGEST)
            progress.advance(task)
    finally:
        buffer.close()
    return found


# ── what is read ────────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _subject(target: Path, each: int, progress: Progress) -> Iterator[_Subject]:
    """Find weights at a path, or write a file there that is removed in the end."""
    if target.is_file():
        size = target.stat().st_size
        if not size:
            raise BadUsage(f"{target} is empty")
        yield _Subject([target], f"{format_bytes(size)}")
        return
    if not target.is_dir():
        raise BadUsage(f"there is no file or folder {target}")
    if files := _weights(target):
        size = sum(file.stat().st_size for file in files)
        yield _Subject(files, f"{format_bytes(size)} in {len(files)} file{'s' * (len(files) > 1)}")
        return
    size = min(each * len(_WAYS), 2 * 1024 * _MIB)
    path = _written(target, size, progress)
    try:
        yield _Subject([path], f"{format_bytes(size)} in a file that was written for it")
    finally:
        path.unlink(missing_ok=True)


def _weights(folder: Path) -> list[Path]:
    """Return the large weight files of a folder and those below it, as far as they lie on the same disk."""
    disk, found = folder.stat().st_dev, {}
    for count, path in enumerate(folder.rglob("*")):
        if count == _MOST_ENTRIES:
            break
        if path.suffix in _WEIGHTS and path.is_file():
            status = path.stat()
            if status.st_size >= _LEAST_FILE and status.st_dev == disk:
                found[status.st_ino] = path  # the hub's cache has names for one file in several folders
    return sorted(found.values())


def _written(folder: Path, size: int, progress: Progress) -> Path:
    free = shutil.disk_usage(folder).free
    if size + _SPARE > free:
        raise DiskFull(folder, size + _SPARE, free)
    block = os.urandom(16 * _MIB)  # long enough for no file system to find the repetition and compress it away
    task = progress.add_task("writing a file to read", total=-(-size // len(block)))
    try:
        handle, name = mkstemp(prefix=".pagein-bench-", dir=folder)
    except OSError as error:
        raise BadUsage(f"{folder} cannot be written to: {error.strerror}", hint="name a large file there") from error
    try:
        with open(handle, "wb", buffering=0) as file:
            for start in range(0, size, len(block)):
                file.write(block[: size - start])
                progress.advance(task)
            os.fsync(file.fileno())
    except BaseException as error:
        Path(name).unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise BadUsage(f"{folder}: a file of {format_bytes(size)} cannot be written: {error.strerror}") from error
        raise
    progress.remove_task(task)
    return Path(name)


# ── how it is shown ─────────────────────────────────────────────────────────────────────────────────


@contextmanager
def _bar(hidden: bool) -> Iterator[tuple[Progress, TaskID]]:
    console = errors()
    columns = TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn()
    with Progress(*columns, console=console, transient=True, disable=hidden or not console.is_terminal) as progress:
        yield progress, progress.add_task("", total=len(_WAYS))


def _table(found: dict[Setting, Measured | None], chosen: DiskSpeed) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bright_black")
    table.add_column("MODE", no_wrap=True)
    for name in ("THREADS", "CHUNK", "GB/S", "CPU S/GB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for way, measured in found.items():
        mark = "taken" if (way.mode, way.threads, way.chunk) == (chosen.mode, chosen.threads, chosen.chunk) else ""
        figures = ("refused", "") if measured is None else (f"{measured.bps / 1e9:.3g}", f"{measured.cpu:.2g}")
        cells = (str(way.mode), str(way.threads), format_bytes(way.chunk), *figures, mark)
        table.add_row(*cells, style="bold green" if mark else None)
    return table


def _told(chosen: DiskSpeed) -> str:
    reads = "1 read" if chosen.threads == 1 else f"{chosen.threads} reads"
    return f"{chosen.mode} reads, {reads} of {format_bytes(chosen.chunk)} at a time"


def _document(
    target: Path,
    kind: str | None,
    subject: _Subject,
    each: int,
    found: dict[Setting, Measured | None],
    chosen: DiskSpeed,
) -> dict[str, object]:
    results = [
        {
            "mode": way.mode,
            "threads": way.threads,
            "chunk_bytes": way.chunk,
            "bytes_per_second": None if measured is None else measured.bps,
            "cpu_seconds_per_gb": None if measured is None else measured.cpu,
        }
        for way, measured in found.items()
    ]
    return {
        "path": str(target),
        "file_system": kind,
        "read": subject.note,
        "bytes_each": each,
        "results": results,
        "chosen": asdict(chosen),
    }
