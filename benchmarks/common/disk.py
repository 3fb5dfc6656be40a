"""What the disk itself gives: the floor under every time per token, and files that are really cold."""

from __future__ import annotations

import json
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common.wire import BenchmarkError

CHUNK = 8 * 1024**2
DEPTH = 4
"""Reads in flight. More gave nothing on the virtual disks that this was tried on."""


def drop_from_cache(files: Sequence[Path]) -> None:
    """Take files out of the page cache."""
    os.sync()  # what is not written yet stays in the cache
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def how_read() -> str:
    """What `raw_speed` reads with."""
    plain = f"preadv of {CHUNK // 1024**2} MiB into huge pages with O_DIRECT in {DEPTH} threads"
    program = shutil.which("fio")
    if program is None:
        return plain
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=False).stdout.strip()
    return f"the faster of {said} ({CHUNK // 1024**2} MiB with O_DIRECT, {DEPTH} in flight) and {plain}"


def raw_speed(files: Sequence[Path]) -> float:
    """Bytes per second of reading files from end to end past the page cache: the faster of fio and a plain loop.

    The loop reads into huge pages, fio into small ones, which cost the kernel more: a floor has to be the best of both.
    """
    drop_from_cache(files)
    program = shutil.which("fio")
    plain = _by_threads(files)
    return max(plain, _by_fio(program, files)) if program else plain


def _by_fio(program: str, files: Sequence[Path]) -> float:
    names = ":".join(str(file).replace(":", r"\:") for file in files)
    told = {"rw": "read", "direct": 1, "bs": CHUNK, "ioengine": "libaio", "iodepth": DEPTH, "readonly": None}
    told |= {"file_service_type": "sequential", "allow_file_create": 0, "output-format": "json"}
    arguments = [f"--{name}" if value is None else f"--{name}={value}" for name, value in told.items()]
    command = [program, "--name=floor", f"--filename={names}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise BenchmarkError(f"fio ended with {done.returncode}: {done.stderr[-500:]}")
    read = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]["read"]
    return float(read["io_bytes"] / (read["runtime"] / 1000))


def _by_threads(files: Sequence[Path]) -> float:
    parts = [(file, start) for file in files for start in range(0, file.stat().st_size, CHUNK)]
    buffers = [mmap.mmap(-1, CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(DEPTH)]
    for buffer in buffers:
        buffer.madvise(mmap.MADV_HUGEPAGE)
    opened = {file: os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files}

    def read(thread: int) -> int:
        return sum(os.preadv(opened[file], [buffers[thread]], start) for file, start in parts[thread::DEPTH])

    try:
        began = time.perf_counter()
        with ThreadPoolExecutor(DEPTH) as pool:
            total = sum(pool.map(read, range(DEPTH)))
        return total / (time.perf_counter() - began)
    finally:
        for number in opened.values():
            os.close(number)
