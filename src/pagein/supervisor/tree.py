"""Every process that a worker started, also those that left its group, its session or their parent.

A process is known by its id and its start time together (`psutil.Process` compares both), never by the id alone.
Members are found by parentage and by a random mark in the environment that they inherit. All of this reads ``/proc``
and may take milliseconds: the daemon calls it in a thread.
"""

from __future__ import annotations

import contextlib
import time

import psutil

MARK_VARIABLE = "PAGEIN_TREE"
_PAUSE = 0.005


class Tree:
    """The processes of one worker. Remembers whom it has seen, since parentage is lost when a parent ends."""

    def __init__(self, pid: int, mark: str) -> None:
        """Begin with the worker itself, which must still be unreaped; raises psutil.Error when it is not."""
        self._root = psutil.Process(pid)
        self._root.create_time()  # kept by the object
        self._mark = mark
        self._seen: set[psutil.Process] = {self._root}

    @property
    def root(self) -> psutil.Process:
        """The worker."""
        return self._root

    def members(self) -> list[psutil.Process]:
        """Look for new members by parentage and return those that run."""
        for process in list(self._seen):
            with contextlib.suppress(psutil.Error):
                self._seen.update(process.children(recursive=True))
        return self._running()

    def hidden(self) -> list[psutil.Process]:
        """Look for members by their mark, among all processes younger than the worker; return those that run."""
        since = self._root.create_time() - 1
        for pid in psutil.pids():
            with contextlib.suppress(psutil.Error, OSError):
                process = psutil.Process(pid)
                if process not in self._seen and process.create_time() >= since and self._is_marked(process):
                    self._seen.add(process)
        return self.members()

    def kill(self, timeout: float) -> list[psutil.Process]:
        """Send SIGKILL to every member until none runs; returns those that still run after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while running := self.members() or self.hidden():
            for process in running:
                with contextlib.suppress(psutil.Error):
                    process.kill()  # psutil checks the start time first
            if time.monotonic() >= deadline:
                return self._running()
            time.sleep(_PAUSE)
        return []

    def _is_marked(self, process: psutil.Process) -> bool:
        return bool(process.environ().get(MARK_VARIABLE) == self._mark)

    def _running(self) -> list[psutil.Process]:
        return [process for process in list(self._seen) if is_running(process)]


def is_running(process: psutil.Process) -> bool:
    """Whether this very process still runs; a zombie holds no memory and does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
