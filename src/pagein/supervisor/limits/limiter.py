"""What the daemon asks to confine its workers: groups where there can be some, else words that say why not."""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagein.supervisor.limits.cell import Cell
from pagein.supervisor.limits.files import CgroupFiles
from pagein.units import format_bytes

_log = logging.getLogger("pagein.limits")

_LONGEST_LABEL = 40
_TRIAL = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Place:
    """Where groups can be made."""

    base: Path
    name: str
    """As the kernel names it: ``/system.slice/pagein.service``."""
    cells: type[Cell]
    leave: Callable[[], None]
    """Undoes what was done to make the place one."""

    def describe(self) -> str:
        """One sentence for people."""
        return f"each worker in a cgroup of its own (v{self.cells.version}, below {self.name})"


class Limiter(ABC):
    """Confines workers. The methods are quick file operations and raise nothing; not for two threads at once."""

    hard: bool
    """Whether `confine` gives cells; where not, the watchdog alone bounds workers."""

    @abstractmethod
    def describe(self) -> str:
        """Return one sentence for the log, the status and the doctor: what limits workers, or why nothing does."""

    @abstractmethod
    def confine(self, name: str, pid: int, limit: int) -> Cell | None:
        """Put the worker of a model, before it takes memory or has children, into a new group with a limit in bytes.

        None where there are no groups, or the kernel refused this one (logged): the watchdog has to do then.
        """

    @abstractmethod
    def sweep(self) -> list[Cell]:
        """Remove what killed daemons of the same state folder left; return the groups in which something lives.

        The caller, who holds the state folder's lock, kills and removes each of them, or keeps it for a worker that it
        takes over; nothing of another state folder is looked at.
        """

    @abstractmethod
    def close(self) -> None:
        """Remove what is empty; idempotent. Groups in which something lives stay for the next daemon's `sweep`."""


class NoGroups(Limiter):
    """Confines nothing, and says why."""

    hard = False

    def __init__(self, words: str) -> None:
        """``words`` is what `describe` says."""
        self._words = words

    def describe(self) -> str:
        """Say why workers have no group."""
        return self._words

    def confine(self, name: str, pid: int, limit: int) -> Cell | None:
        """Give no cell."""
        return None

    def sweep(self) -> list[Cell]:
        """Find nothing."""
        return []

    def close(self) -> None:
        """Nothing to remove."""


class Groups(Limiter):
    """Confines each worker in a group below one of ours, whose name tells the state folder."""

    hard = True

    def __init__(self, files: CgroupFiles, place: Place, state_dir: Path) -> None:
        """Make the parent group and try it with a first limit; raises OSError where that does not work."""
        self._files, self._place = files, place
        self._parent = place.base / group_name(state_dir)
        self._cells: set[Path] = set()
        self._closed = False
        try:
            self._prepare()
            self._try_out()
        except OSError:
            self._files.remove(self._parent)
            raise

    def _prepare(self) -> None:
        self._files.make(self._parent)
        if self._place.cells.version == 2:
            enable_memory(self._files, self._parent)
        elif self._files.read(self._parent / "memory.use_hierarchy") == "0":
            self._files.write(self._parent / "memory.use_hierarchy", 1)  # kernels before 5.11

    def _try_out(self) -> None:
        cell = self._new_cell("trial")
        try:
            cell.protect(_TRIAL)
            if cell.limit != _TRIAL:
                raise OSError(f"a limit of {_TRIAL} bytes reads back as {cell.limit}")
        finally:
            cell.remove()

    def _new_cell(self, name: str) -> Cell:
        cell = self._place.cells(self._files, self._parent / f"{label(name)}-{secrets.token_hex(4)}")
        self._files.make(cell.directory)
        return cell

    def describe(self) -> str:
        """Say where the groups are."""
        return self._place.describe()

    def confine(self, name: str, pid: int, limit: int) -> Cell | None:
        """Make a group, limit it, and move the worker in."""
        cell: Cell | None = None
        try:
            cell = self._new_cell(name)
            cell.protect(limit)
            cell.join(pid)
        except OSError as error:
            _log.warning("no cgroup of %s for %s (process %d): %s", format_bytes(limit), name, pid, error)
            if cell is not None:
                cell.remove()
            return None
        self._cells = {directory for directory in self._cells if directory.exists()} | {cell.directory}
        return cell

    def sweep(self) -> list[Cell]:
        """Look below our parent group, and below its namesakes beside our base: an earlier scope of systemd."""
        left = []
        for parent in self._parents():
            for directory in self._files.children(parent):
                cell = self._place.cells(self._files, directory)
                if directory in self._cells or cell.remove():
                    continue
                self._cells.add(directory)
                left.append(cell)
            if parent != self._parent:
                self._files.remove(parent)  # stays while something lives in it; `close` tries again
        return left

    def _parents(self) -> list[Path]:
        around = self._place.base.parent
        inside = (around / "cgroup.procs").exists()  # else the base is the top of the hierarchy
        places = [around, *self._files.children(around)] if inside else [self._place.base]
        parents = [place / self._parent.name for place in places]
        return [parent for parent in parents if parent.is_dir()]

    def close(self) -> None:
        """Remove the empty groups, then the parent, then leave the place as it was found."""
        for parent in self._parents():
            for directory in self._files.children(parent):
                self._place.cells(self._files, directory).remove()
            self._files.remove(parent)
        if not self._closed and not self._parent.exists():
            self._closed = True
            self._place.leave()


def group_name(state_dir: Path) -> str:
    """Return the name of the parent group of a state folder's workers: ours, and nobody else's."""
    return f"pagein-{hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:16]}"


def label(name: str) -> str:
    """Return a model's name as a part of a group's name: without dots, which the kernel's own files have."""
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:_LONGEST_LABEL]


def enable_memory(files: CgroupFiles, group: Path) -> None:
    """Let the groups below a v2 group have memory limits; raises OSError."""
    control = group / "cgroup.subtree_control"
    if "memory" not in files.words(control):
        files.write(control, "+memory")
