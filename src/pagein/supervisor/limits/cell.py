"""One worker's control group: its limit, what it holds, who is in it, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

from pagein.supervisor.limits.files import CgroupFiles

_PAUSE = 0.005


class Cell(ABC):
    """A group that holds one worker with all its children: they are born into it and cannot leave it unprivileged.

    What a process took before it came in stays charged to where it took it, so a worker comes in before it loads.
    All methods are quick file operations except `kill`; questions about a group that is gone answer None.
    """

    version: ClassVar[int]
    """Of the cgroup hierarchy."""
    kills_together: ClassVar[bool]
    """Whether the kernel ends the whole group when it runs out of memory, and not one process of it."""
    limit_file: ClassVar[str]

    def __init__(self, files: CgroupFiles, directory: Path) -> None:
        """Name a group, which need not exist yet."""
        self._files = files
        self.directory = directory

    @property
    def limit(self) -> int | None:
        """Bytes that the group may hold as the kernel has it; None where the group is gone or has no limit."""
        return self._files.number(self.directory / self.limit_file)

    @abstractmethod
    def protect(self, limit: int) -> None:
        """Write the limit and the settings around it into a new group; raises OSError."""

    def join(self, pid: int) -> None:
        """Move a process with all its threads in, not its children; raises OSError."""
        self._files.write(self.directory / "cgroup.procs", pid)

    def set_limit(self, limit: int) -> bool:
        """Change the limit; False, and the old one stands, when the group holds more than that.

        The kernel is not asked to go below what it could not take from the worker: v2 would end it for that.
        """
        now = self.limit
        if now is not None and limit < now and (self.usage() or 0) + self._locked() > limit:
            return False
        try:
            self._write_limit(limit)
        except OSError:
            return False
        return True

    @abstractmethod
    def _write_limit(self, limit: int) -> None:
        """Write the limit; raises OSError (v1: EBUSY when it cannot be reached)."""

    @abstractmethod
    def oom_kills(self) -> int | None:
        """How many processes of this group any OOM killer ended: for this limit, an ancestor's or the machine's."""

    @abstractmethod
    def hit_limit(self) -> bool | None:
        """Whether memory ran out at this group's own limit, so that a kill in it was for that; None = unknown."""

    @abstractmethod
    def peak(self) -> int | None:
        """Most bytes ever charged, file cache included: after an OOM kill the least that the worker wanted.

        No measure of need otherwise: reading large files fills any group up to its limit without harm.
        """

    @abstractmethod
    def usage(self) -> int | None:
        """Bytes that stay when caches go: anonymous, shared and kernel memory, without file pages."""

    @abstractmethod
    def _locked(self) -> int:
        """Bytes that are locked in memory (mlock), file pages among them."""

    def pids(self) -> list[int]:
        """Return the living processes in the group and in groups that the worker made below it."""
        return sorted(pid for group in self._files.tree(self.directory) for pid in self._files.pids(group))

    def kill(self, timeout: float = 2.0) -> list[int]:
        """End everything in the group; waits until it is empty, at most ``timeout`` seconds; returns who is left."""
        deadline = time.monotonic() + timeout
        while pids := self.pids():
            if time.monotonic() >= deadline:
                return pids
            self._kill_once(pids)
            time.sleep(_PAUSE)
        return []

    def _kill_once(self, pids: list[int]) -> None:
        for pid in pids:  # read a moment ago from the group itself, so the numbers are not somebody else's by now
            if pid != os.getpid():
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)

    def remove(self) -> bool:
        """Remove the group; False while something is in it. Its file cache stays cached, charged to the parent."""
        return all(self._files.remove(group) for group in self._files.tree(self.directory))
