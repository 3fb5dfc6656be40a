"""The places where groups can be made without asking anybody: below our own group, or at the top."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath

from pagein.memory.probes.cgroup import Level, parse_membership, read_levels
from pagein.memory.probes.linux import read_text
from pagein.supervisor.limits.cell_v1 import MemoryCell
from pagein.supervisor.limits.cell_v2 import UnifiedCell
from pagein.supervisor.limits.delegation import LEAF, settle, strangers
from pagein.supervisor.limits.files import CgroupFiles
from pagein.supervisor.limits.limiter import Place, enable_memory


class Unavailable(Exception):
    """A way is not open; the text says why, for people."""


class Absent(Unavailable):
    """This system has nothing of the kind: not worth a word where something else is in the way."""


class Way(ABC):
    """One way to a place for groups."""

    def __init__(self, files: CgroupFiles) -> None:
        """Look at the machine whose files these are."""
        self.files = files

    @abstractmethod
    def look(self) -> Place:
        """Return the place as far as reading can tell; changes nothing; raises Unavailable."""

    def open(self) -> Place:
        """Make it a place for groups; raises Unavailable and OSError."""
        return self.look()


class OwnV2(Way):
    """Below our own v2 group: delegated to us by systemd or a container, or ours as root."""

    def look(self) -> Place:
        """Our group, where memory is handed down, we may write and nobody else's processes are in the way."""
        level = self._base()
        base, name = level.directory, level.path
        if "memory" not in self.files.words(base / "cgroup.controllers"):
            raise Unavailable(f"cgroup v2 {name} has no memory controller")
        if not self.files.may_write(base, base / "cgroup.procs", base / "cgroup.subtree_control"):
            raise Unavailable(f"cgroup v2 {name} is not writable")
        if under_systemd(self.files) and os.geteuid() == 0 and not _marked(base):
            raise Unavailable(f"cgroup v2 {name} is systemd's (a service needs Delegate=yes)")
        if others := strangers(self.files, base):
            raise Unavailable(f"cgroup v2 {name} holds other processes too ({', '.join(map(str, others[:3]))})")
        return Place(base, name, UnifiedCell, lambda: None)

    def _base(self) -> Level:
        """Our group, or the one above where ours is the leaf that `settle` or systemd's DelegateSubgroup= made."""
        own = PurePosixPath(own_group(self.files, 2) or "/")
        for level in levels_of(self.files, 2):
            above = own.name == LEAF and level.path == str(own.parent)
            if above and self.files.may_write(level.directory) and not self.files.pids(level.directory):
                return level
        return own_level(self.files, 2)

    def open(self) -> Place:
        """Move ourselves into a leaf, so that the group may have limited groups below it."""
        found = self.look()
        return Place(found.base, found.name, found.cells, settle(self.files, found.base))


class TopV2(Way):
    """At the top of the v2 hierarchy, as root, where no systemd rules it."""

    def look(self) -> Place:
        """The top, where our own limits would not be left by that."""
        levels = levels_of(self.files, 2)
        if not levels or os.geteuid() != 0 or under_systemd(self.files):
            raise Absent("the top of cgroup v2 is not ours")
        top = levels[-1]
        if not is_top(self.files, top.directory) or not self.files.may_write(top.directory / "cgroup.subtree_control"):
            raise Absent("the top of cgroup v2 is out of reach")
        if any(level.limits for level in levels):
            raise Unavailable(f"cgroup v2 {levels[0].path} or above is limited, which workers at the top would escape")
        return Place(top.directory, top.path, UnifiedCell, lambda: None)

    def open(self) -> Place:
        """Hand the memory controller down."""
        place = self.look()
        enable_memory(self.files, place.base)
        return place


class OwnV1(Way):
    """Below our own group of the v1 memory hierarchy."""

    def look(self) -> Place:
        """Our group, where we may make others in it; processes beside them do not matter in v1."""
        level = own_level(self.files, 1)
        if not self.files.may_write(level.directory, level.directory / "cgroup.procs"):
            raise Unavailable(f"cgroup v1 {level.path} is not writable")
        return Place(level.directory, level.path, MemoryCell, lambda: None)


def own_level(files: CgroupFiles, version: int) -> Level:
    """Return our own group; raises Unavailable where it has no memory files or is not shown."""
    levels = levels_of(files, version)
    if not levels:
        raise Absent(f"cgroup v{version} has no memory controller here")
    own = own_group(files, version)
    if levels[0].path != own:
        raise Unavailable(f"cgroup v{version} {own} has no memory controller")
    return levels[0]


def own_group(files: CgroupFiles, version: int) -> str | None:
    """Return the name of our own group."""
    groups = parse_membership(read_text(files.root / "proc/self/cgroup") or "")
    return groups.get("" if version == 2 else "memory")


def under_systemd(files: CgroupFiles) -> bool:
    """Whether systemd is the init of this machine (``sd_booted``)."""
    return (files.root / "run/systemd/system").is_dir()


def is_top(files: CgroupFiles, group: Path) -> bool:
    """Whether a v2 group is the hierarchy's real top, which has no type; a container's top has one."""
    return files.read(group / "cgroup.type") is None


def levels_of(files: CgroupFiles, version: int) -> list[Level]:
    """Return our group and those above it that have memory files, in one hierarchy, innermost first."""
    return [level for level in read_levels(files.root) if level.version == version]


def _marked(group: Path) -> bool:
    """Whether systemd says that it delegated a group; without that mark it is systemd's, though root may write it."""
    for name in ("user.delegate", "trusted.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False
