"""A lock for state that also changes when Python collects something, which may happen in any thread at any line."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from types import TracebackType


class DeferringLock:
    """Not reentrant. What `soon` is given runs under the lock: now where it is free, else as it is let go.

    A finaliser must not wait for a lock that its own thread may hold just then; so it never waits here.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acts: deque[Callable[[], None]] = deque()

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """Take the lock; as `threading.Lock`."""
        return self._lock.acquire(blocking, timeout)

    def release(self) -> None:
        """Let go of the lock, after what was deferred has run."""
        try:
            self._run()
        finally:
            self._lock.release()
        self._catch_up()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def soon(self, act: Callable[[], None]) -> None:
        """Run ``act`` under the lock, without waiting for it; ``act`` must not raise. For finalisers."""
        self._acts.append(act)
        self._catch_up()

    def _catch_up(self) -> None:
        # Whoever added an act while the lock was being let go did not get it: look again after each release.
        while self._acts and self._lock.acquire(blocking=False):
            try:
                self._run()
            finally:
                self._lock.release()

    def _run(self) -> None:
        while self._acts:
            self._acts.popleft()()
