"""A short test of a folder's disk for KV: writes a file there, reads it cold, removes it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkstemp
from time import perf_counter

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from pagein.cli.console import errors
from pagein.errors import BadUsage, DiskFull
from pagein.weights.reading.disk import file_system, probe

_MIB = 1024**2
SIZE = 256 * _MIB
_PIECE = 16 * _MIB
_SPARE = 1024 * _MIB
"""Bytes that the file leaves free on its disk."""


@dataclass(frozen=True, slots=True)
class DiskTest:
    """Bytes per second, and what it was."""

    write: float
    """Until the disk said that it has them (fsync)."""
    read: float
    """Past the page cache where that is not slower."""
    kind: str | None
    """File system; None where unknown."""
    how: str


def measure_disk(folder: Path) -> DiskTest:
    """Write 256 MiB and read them; progress on standard error. Raises BadUsage and DiskFull."""
    if not folder.is_dir():
        raise BadUsage(f"there is no folder {folder}")
    free = shutil.disk_usage(folder).free
    if free < SIZE + _SPARE:
        raise DiskFull(folder, SIZE + _SPARE, free)
    try:
        handle, name = mkstemp(prefix=".pagein-doctor-", dir=folder)
    except OSError as error:
        raise BadUsage(f"{folder} cannot be written to: {error.strerror}") from error
    path, console = Path(name), errors()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True)
    try:
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task(f"writing to {folder}", total=SIZE)
            seconds = _write(handle, lambda count: progress.advance(task, count))
            progress.update(task, description="reading it", total=None)
            found = probe([path], SIZE)
        return DiskTest(SIZE / seconds, found.bytes_per_second, file_system(path), found.why)
    except OSError as error:
        raise BadUsage(f"{folder}: a file of 256 MiB cannot be written: {error.strerror}") from error
    finally:
        path.unlink(missing_ok=True)


def _write(handle: int, advance: Callable[[int], None]) -> float:
    piece = os.urandom(_PIECE)  # long enough for no file system to find the repetition and compress it away
    begin = perf_counter()
    with open(handle, "wb", buffering=0) as file:
        for _ in range(SIZE // _PIECE):
            file.write(piece)
            advance(_PIECE)
        os.fsync(file.fileno())
    return perf_counter() - begin
