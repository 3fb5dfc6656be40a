"""The rule of v2 that a group with limited groups below it holds no processes itself: ours move into a leaf."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pagein.memory.probes.process import members, read_kinship
from pagein.supervisor.limits.files import CgroupFiles

LEAF = "daemon"
"""The group of the daemon itself, beside those of its workers."""
_ROUNDS = 10
"""Moves are repeated for processes that were born meanwhile."""


def strangers(files: CgroupFiles, base: Path) -> list[int]:
    """Return the processes in a group that are neither this one nor its children, and so not ours to move."""
    if files.read(base / "cgroup.type") is None:
        return []  # the hierarchy's top may hold processes
    return sorted(set(files.pids(base)) - _family(files))


def settle(files: CgroupFiles, base: Path) -> Callable[[], None]:
    """Make a group one that may have limited groups; returns how to undo that; raises OSError, undone."""
    control = base / "cgroup.subtree_control"
    if "memory" in files.words(control):
        return lambda: None
    leaf = base / LEAF
    moves = files.read(base / "cgroup.type") is not None
    try:
        if moves:
            files.make(leaf)
            _move(files, base, leaf)
        files.write(control, "+memory")
    except OSError:
        _unsettle(files, base, moves)
        raise
    return lambda: _unsettle(files, base, moves)


def _unsettle(files: CgroupFiles, base: Path, moved: bool) -> None:
    files.try_write(base / "cgroup.subtree_control", "-memory")
    if moved:
        leaf = base / LEAF
        for pid in files.pids(leaf):
            files.try_write(base / "cgroup.procs", pid)
        files.remove(leaf)


def _move(files: CgroupFiles, source: Path, target: Path) -> None:
    for _ in range(_ROUNDS):
        pids = files.pids(source)
        if not pids:
            return
        for pid in pids:
            try:
                files.write(target / "cgroup.procs", pid)
            except ProcessLookupError:
                continue  # it ended
    raise OSError(f"processes keep appearing in {source}")


def _family(files: CgroupFiles) -> set[int]:
    return {os.getpid(), *members(read_kinship(files.root / "proc"), os.getpid())}
