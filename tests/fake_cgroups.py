"""A folder that behaves like the kernel's cgroup file systems, as far as limits are concerned.

Making a group gives it its files, a written process leaves its old group, a v2 group with controllers below it takes no
processes, a group in use cannot be removed, and what one of these rules forbids fails with the kernel's own error.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from pagein.supervisor.limits.files import CgroupFiles

UNLIMITED = 0x7FFFFFFFFFFFF000
_V2_MEMORY = {
    "memory.max": "max",
    "memory.current": "0",
    "memory.peak": "0",
    "memory.swap.max": "max",
    "memory.oom.group": "0",
    "memory.events": "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0",
    "memory.stat": "anon 0\nfile 0\nkernel 0\nshmem 0",
}
_V1_MEMORY = {
    "memory.limit_in_bytes": str(UNLIMITED),
    "memory.memsw.limit_in_bytes": str(UNLIMITED),
    "memory.usage_in_bytes": "0",
    "memory.max_usage_in_bytes": "0",
    "memory.failcnt": "0",
    "memory.swappiness": "60",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0",
    "memory.stat": "total_rss 0\ntotal_shmem 0",
    "memory.kmem.usage_in_bytes": "0",
}


class FakeCgroups(CgroupFiles):
    """One mounted hierarchy under a folder."""

    def __init__(self, root: Path, version: int, controllers: str = "cpu memory") -> None:
        super().__init__(root)
        self.version = version
        self.top = root / "sys/fs/cgroup"
        self.written: list[tuple[str, str]] = []
        """Name of the file and value, in order."""
        self.top.mkdir(parents=True)
        kind = "cgroup2 cgroup2 rw" if version == 2 else "cgroup cgroup rw,memory"
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text(f"30 21 0:26 / /sys/fs/cgroup rw - {kind}\n")
        self._fill(self.top, _V1_MEMORY if version == 1 else {"memory.stat": "anon 0"})
        self._fill(self.top, {"cgroup.procs": ""})
        if version == 2:
            self._fill(self.top, {"cgroup.controllers": controllers, "cgroup.subtree_control": ""})

    def at(self, group: str, *pids: int) -> Path:
        """Make a group with all above it, hand controllers down to it, and put processes in."""
        here = self.top
        for part in Path(group.lstrip("/")).parts:
            if self.version == 2:
                (here / "cgroup.subtree_control").write_text((here / "cgroup.controllers").read_text())
            here = here / part
            if not here.exists():
                self.make(here)
        (here / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return here

    def live_in(self, group: str) -> None:
        """Say that this process is in a group."""
        line = f"0::{group}\n" if self.version == 2 else f"4:memory:{group}\n"
        (self.root / "proc/self/cgroup").write_text(line)

    def make(self, group: Path) -> None:
        if group.exists():
            return
        group.mkdir()
        self._fill(group, {"cgroup.procs": ""})
        if self.version == 1:
            self._fill(group, _V1_MEMORY)
            return
        handed = (group.parent / "cgroup.subtree_control").read_text()
        self._fill(group, {"cgroup.type": "domain", "cgroup.controllers": handed, "cgroup.subtree_control": ""})
        if "memory" in handed:
            self._fill(group, _V2_MEMORY)

    def remove(self, group: Path) -> bool:
        if group.exists():
            if self.pids(group) or self.children(group):
                return False
            for file in group.iterdir():
                file.unlink()
        return super().remove(group)

    def write(self, path: Path, value: int | str) -> None:
        if not path.exists():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
        self.written.append((path.name, str(value)))
        match path.name:
            case "cgroup.procs":
                self._move(int(value), path.parent)
            case "cgroup.subtree_control":
                self._hand_down(str(value), path.parent)
            case "memory.limit_in_bytes" | "memory.memsw.limit_in_bytes":
                path.write_text(str(value))
                limit, with_swap = (self.number(path.parent / f"memory.{n}limit_in_bytes") for n in ("", "memsw."))
                if limit is not None and with_swap is not None and with_swap < limit:
                    raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            case "memory.oom_control":
                pass  # it answers other words than it takes
            case _:
                path.write_text(str(value))

    def _move(self, pid: int, group: Path) -> None:
        if self.version == 2 and group != self.top and (group / "cgroup.subtree_control").read_text():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        for other in self.tree(self.top):
            left = [number for number in self.pids(other) if number != pid]
            (other / "cgroup.procs").write_text("".join(f"{number}\n" for number in left))
        with (group / "cgroup.procs").open("a") as file:
            file.write(f"{pid}\n")

    def _hand_down(self, change: str, group: Path) -> None:
        control, name = group / "cgroup.subtree_control", change[1:]
        if change.startswith("-"):
            control.write_text(" ".join(word for word in self.words(control) if word != name))
            return
        if name not in self.words(group / "cgroup.controllers"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if group != self.top and self.pids(group):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        control.write_text(" ".join([*self.words(control), name]))
        for child in self.children(group):
            self._fill(child, {"cgroup.controllers": control.read_text(), **_V2_MEMORY})

    @staticmethod
    def _fill(group: Path, files: dict[str, str]) -> None:
        for name, text in files.items():
            (group / name).write_text(f"{text}\n" if text else "")
