"""Memory limits of the control groups that hold this process: v1, v2 and both at once (hybrid).

Every ancestor counts, up to the top of the mounted hierarchy: a limit of a systemd slice or of a Kubernetes pod
binds its children although their own files say ``max``. Sources: kernel documentation
``admin-guide/cgroup-v2.rst`` and ``admin-guide/cgroup-v1/memory.rst``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

from pagein.memory.probes.linux import parse_counters, path_in, read_text

_UNLIMITED = 1 << 62
"""v1 writes "no limit" as LONG_MAX rounded down to a page (0x7ffffffffffff000 with 4 KiB pages)."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One finite limit."""

    file: str
    """The file that holds it: ``memory.max``."""
    bytes: int


@dataclass(frozen=True, slots=True)
class Level:
    """One control group on the way from this process to the top; unknown is None."""

    path: str
    """As the kernel names it, seen from this process: ``/system.slice/pagein.service``."""
    version: int
    directory: Path
    limits: tuple[Limit, ...]
    usage: int | None
    """Bytes charged to the group and all its descendants, page cache included."""
    reclaimable: int | None
    """Bytes of ``usage`` that the kernel drops without harm when somebody needs room."""

    @property
    def limit(self) -> Limit | None:
        """The tightest limit of this group, or None when it has none."""
        return min(self.limits, key=lambda limit: limit.bytes, default=None)

    @property
    def available(self) -> int | None:
        """Bytes that the group can still take without harm; None when it has no limit or its use is unknown."""
        if self.limit is None or self.usage is None:
            return None
        # Without memory.stat nothing is known to be reclaimable: what remains is the sure part.
        held = max(0, self.usage - (self.reclaimable or 0))
        return max(0, self.limit.bytes - held)


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted hierarchy that can hold memory limits."""

    root: str
    """The group that the mount shows at its top; not ``/`` where a container sees a part of the host's tree."""
    point: str
    version: int


def parse_membership(text: str) -> dict[str, str]:
    """Return controller → group of ``/proc/PID/cgroup``; the v2 hierarchy has the empty name."""
    groups = {}
    for line in text.splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                groups[controller] = parts[2]
    return groups


def parse_mounts(text: str) -> list[Mount]:
    """Return the mounts of ``/proc/PID/mountinfo`` that can hold memory limits, in order."""
    mounts = []
    for line in text.splitlines():
        before, separator, after = line.partition(" - ")
        fields, types = before.split(" "), after.split(" ")
        if not separator or len(fields) < 5 or len(types) < 3:
            continue
        root, point = _unescape(fields[3]), _unescape(fields[4])
        if types[0] == "cgroup2":
            mounts.append(Mount(root, point, 2))
        elif types[0] == "cgroup" and "memory" in types[2].split(","):
            mounts.append(Mount(root, point, 1))
    return mounts


def reclaimable_bytes(stat: dict[str, int], version: int) -> int | None:
    """Return what of a group's charge is cache that can go, from its ``memory.stat``; None when the file does not say.

    Inactive file pages count, and so do active ones that no process has mapped: weights that were read twice
    stand on the active list, and the kernel moves them over when the inactive list runs low. Mapped active pages
    do not count: they are the weights of models in use. (MemAvailable counts both lists whole.) v1 gives the sums
    over descendants as ``total_``; its statistics have no reclaimable slab.
    """
    prefix, mapped_name = ("", "file_mapped") if version == 2 else ("total_", "total_mapped_file")
    inactive = stat.get(f"{prefix}inactive_file")
    if inactive is None:
        return None
    active, mapped = stat.get(f"{prefix}active_file"), stat.get(mapped_name)
    unmapped = inactive if active is None or mapped is None else inactive + active - mapped
    return max(inactive, unmapped) + stat.get("slab_reclaimable", 0)


def read_levels(root: Path = Path("/"), pid: str = "self") -> tuple[Level, ...]:
    """Return every group with memory files from the process up to the top of each hierarchy, innermost first."""
    groups = parse_membership(read_text(path_in(root, f"proc/{pid}/cgroup")) or "")
    mounts = parse_mounts(read_text(path_in(root, f"proc/{pid}/mountinfo")) or "")
    levels: list[Level] = []
    for version, controller in ((2, ""), (1, "memory")):
        group = groups.get(controller)
        mount = None if group is None else _choose([m for m in mounts if m.version == version], group)
        if group is not None and mount is not None:
            levels.extend(_climb(root, mount, group))
    return tuple(levels)


def _choose(mounts: list[Mount], group: str) -> Mount | None:
    """The mount that shows our group; else, where a namespace hides the path, the first one."""
    shows = [m for m in mounts if _below(group, m.root) is not None]
    return next(iter(shows or mounts), None)


@lru_cache(maxsize=64)
def _below(group: str, top: str) -> PurePosixPath | None:
    """The path of ``group`` relative to ``top``, or None when it lies elsewhere."""
    try:
        relative = PurePosixPath(group).relative_to(top)
    except ValueError:
        return None
    return None if ".." in relative.parts else relative


@lru_cache(maxsize=64)
def _named(top: str, step: PurePosixPath) -> str:
    """A group as the kernel names it, seen from this process."""
    return str(PurePosixPath(top) / step)


def _climb(root: Path, mount: Mount, group: str) -> Iterator[Level]:
    # A group outside what the mount shows leaves only the mount's own top, whose limit binds us all the same.
    relative = _below(group, mount.root) or PurePosixPath()
    top = path_in(root, mount.point.lstrip("/"))
    steps = [relative, *relative.parents] if relative.parts else [relative]
    inner = True
    for step in steps:
        directory = path_in(top, str(step))
        if not inner and mount.version == 1 and _flat(directory):
            return
        level = _read_level(directory, _named(mount.root, step), mount.version, step == steps[-1])
        if level is not None:
            inner = False
            yield level


def _flat(directory: Path) -> bool:
    """Whether a v1 group does not count its children (kernels before 5.11 without use_hierarchy)."""
    return (read_text(path_in(directory, "memory.use_hierarchy")) or "1").strip() == "0"


def _read_level(directory: Path, path: str, version: int, top: bool) -> Level | None:
    names = ("memory.max", "memory.high") if version == 2 else ("memory.limit_in_bytes",)
    usage = _number(path_in(directory, "memory.current" if version == 2 else "memory.usage_in_bytes"))
    limits = [Limit(name, value) for name in names if (value := _number(path_in(directory, name))) is not None]
    stat_text = read_text(path_in(directory, "memory.stat"))
    if usage is None and stat_text is None and not limits:
        return None
    stat = parse_counters(stat_text or "")
    # v1 tells the tightest limit of all ancestors, those outside the container too.
    hidden = stat.get("hierarchical_memory_limit") if version == 1 and top else None
    if hidden is not None and hidden < min((limit.bytes for limit in limits), default=_UNLIMITED):
        limits.append(Limit("memory.stat hierarchical_memory_limit", hidden))
    return Level(path, version, directory, tuple(limits), usage, reclaimable_bytes(stat, version))


def _number(path: Path) -> int | None:
    """A size; None for ``max``, for v1's huge "no limit" and for what cannot be read."""
    text = (read_text(path) or "").strip()
    value = int(text) if text.isdigit() else None
    return None if value is None or value >= _UNLIMITED else value


def _unescape(field: str) -> str:
    """Mountinfo writes blanks and backslashes of paths as octal numbers."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
