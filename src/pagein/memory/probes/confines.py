"""What a system lets a process lock, share and open: locked memory, ``/dev/shm``, SELinux and AppArmor."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from pagein.memory.probes.linux import path_in, read_text

SHM = "/dev/shm"  # noqa: S108 - looked at, never written to


@dataclass(frozen=True, slots=True)
class SharedMemory:
    """The file system behind POSIX shared memory; unknown is None."""

    size: int | None
    free: int | None
    mode: int | None
    """Permission bits, such as 0o1777."""
    writable: bool
    """Whether this user may make files there."""
    options: tuple[str, ...] = ()
    """Mount options."""


@dataclass(frozen=True, slots=True)
class Confines:
    """Everything that this module reads; unknown is None."""

    locked: int | None = None
    """Bytes that a process may lock (soft limit)."""
    locked_unlimited: bool = False
    shm: SharedMemory | None = None
    """None where there is no such folder."""
    selinux: str | None = None
    """enforcing or permissive; None where it is off."""
    apparmor: str | None = None
    """The profile that this process runs under, or "on" where it cannot be told; None where AppArmor is off."""


def read_confines(root: Path = Path("/")) -> Confines:
    """Read them under ``root``; nothing raises."""
    locked = _locked(read_text(path_in(root, "proc/self/limits")) or "")
    return Confines(
        locked=locked if isinstance(locked, int) else None,
        locked_unlimited=locked == "unlimited",
        shm=_shm(root),
        selinux={"1": "enforcing", "0": "permissive"}.get(
            (read_text(path_in(root, "sys/fs/selinux/enforce")) or "").strip()
        ),
        apparmor=_apparmor(root),
    )


def mount_options(mountinfo: str, target: str) -> tuple[str, ...] | None:
    """Return the options of what is mounted at a folder, its own and the file system's; None where nothing is.

    The last line wins: a mount hides the one below it (``Documentation/filesystems/proc.rst``, 3.5).
    """
    found = None
    for line in mountinfo.splitlines():
        before, separator, after = line.partition(" - ")
        words, rest = before.split(), after.split()
        if separator and len(words) > 5 and words[4] == target and len(rest) > 2:
            found = tuple(dict.fromkeys([*words[5].split(","), *rest[2].split(",")]))
    return found


def _locked(limits: str) -> int | str | None:
    for line in limits.splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return int(soft) if soft.isdigit() else soft
    return None


def _shm(root: Path) -> SharedMemory | None:
    folder = root / SHM.lstrip("/")
    try:
        status, space = folder.stat(), os.statvfs(folder)
    except OSError:
        return None
    options = mount_options(read_text(path_in(root, "proc/self/mountinfo")) or "", SHM)
    return SharedMemory(
        size=space.f_frsize * space.f_blocks,
        free=space.f_frsize * space.f_bavail,
        mode=stat.S_IMODE(status.st_mode),
        writable=os.access(folder, os.W_OK | os.X_OK) and "ro" not in (options or ()),
        options=options or (),
    )


def _apparmor(root: Path) -> str | None:
    if (read_text(path_in(root, "sys/module/apparmor/parameters/enabled")) or "").strip() != "Y":
        return None
    # Where several security modules are stacked, each has a folder of its own (kernel 5.8).
    for name in ("proc/self/attr/apparmor/current", "proc/self/attr/current"):
        profile = (read_text(path_in(root, name)) or "").strip("\0\n ")
        if profile:
            return profile
    return "on"
