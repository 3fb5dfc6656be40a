"""A memory group that a child runs in: its limit holds for all it takes, the page cache that it fills included."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from common.wire import BenchmarkError

V1 = Path("/sys/fs/cgroup/memory")
V2 = Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Group:
    """A group of its own, of either hierarchy."""

    folder: Path
    version: int

    def peak(self) -> int:
        """The most bytes it ever had, page cache included."""
        return int((self.folder / ("memory.max_usage_in_bytes" if self.version == 1 else "memory.peak")).read_text())

    def killed(self) -> int:
        """How many processes the kernel has ended in it for want of memory."""
        file = "memory.oom_control" if self.version == 1 else "memory.events"
        rows = dict(line.split() for line in (self.folder / file).read_text().splitlines())
        return int(rows.get("oom_kill", 0))


@contextlib.contextmanager
def memory_group(limit: int) -> Iterator[Group]:
    """Make a group with a limit and no swap, and remove it; raises BenchmarkError where that is not allowed."""
    version = 1 if V1.is_dir() else 2
    parent = V1 if version == 1 else V2
    folder = parent / f"pagein-bench-{os.getpid()}"
    try:
        if version == 2:
            (parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        _set_limit(folder, version, limit)
    except OSError as error:
        raise BenchmarkError(f"no memory group can be made in {parent}: {error.strerror} (run as root)") from None
    try:
        yield Group(folder, version)
    finally:
        for line in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):  # ended meanwhile
                (parent / "cgroup.procs").write_text(line)
        if version == 1:
            with contextlib.suppress(OSError):  # or its page cache would keep the group's remains alive
                (folder / "memory.force_empty").write_text("0")
        with contextlib.suppress(OSError):
            folder.rmdir()


def _set_limit(folder: Path, version: int, limit: int) -> None:
    if version == 1:
        (folder / "memory.limit_in_bytes").write_text(str(limit))
        with contextlib.suppress(OSError):
            (folder / "memory.swappiness").write_text("0")
        return
    (folder / "memory.max").write_text(str(limit))
    with contextlib.suppress(OSError):  # no swap is accounted here
        (folder / "memory.swap.max").write_text("0")
