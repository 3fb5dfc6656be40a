"""The one thread that moves blocks between tiers: in small steps, so that what a turn waits for goes first."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from weakref import WeakSet

log = logging.getLogger("pagein.kv")


class Move:
    """Work in steps. Ends exactly once: done, failed or called off."""

    def __init__(self, steps: Iterator[None], name: str, on_end: Callable[[], None] | None = None) -> None:
        """``on_end`` is called exactly once, in the thread of the last step, also where no step ever ran."""
        self.name = name
        self._on_end = on_end
        self.error: Exception | None = None
        self._steps = steps
        self._called_off = False
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """True once no step of it runs or will run."""
        return self._ended.is_set()

    def call_off(self) -> None:
        """Let it end before its next step; its ``finally`` clauses run, and ``on_end``."""
        self._called_off = True

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for its end; False where the time passed before."""
        return self._ended.wait(timeout)

    def step(self) -> bool:
        """Run one step; True while there are more. Called by one thread at a time."""
        try:
            if self._called_off:
                close = getattr(self._steps, "close", None)
                if close is not None:
                    close()
            else:
                next(self._steps)
                return True
        except StopIteration:
            pass
        except Exception as error:  # a move that fails is a miss for whom it was made, and no end of the others
            log.warning("moving KV blocks (%s) failed: %s", self.name, error)
            self.error = error
        try:
            if self._on_end is not None:
                self._on_end()
        finally:
            self._ended.set()
        return False


class Mover:
    """Runs moves in a daemon thread: urgent ones before others, each kind in the order of asking."""

    def __init__(self) -> None:
        self._urgent: deque[Move] = deque()
        self._others: deque[Move] = deque()
        self._news = threading.Condition()
        self._wake: SimpleQueue[None] = SimpleQueue()
        """One for each reason to look again; unlike a condition it may be told from a finalizer."""
        self._closed = self._ended = False
        self._last: deque[Callable[[], None]] = deque()
        _living.add(self)
        self._thread = threading.Thread(target=self._run, name="pagein-kv", daemon=True)
        self._thread.start()

    def add(
        self, steps: Iterator[None], name: str, *, urgent: bool = False, on_end: Callable[[], None] | None = None
    ) -> Move:
        """Queue a move; after `close` it is called off at once."""
        move = Move(steps, name, on_end)
        with self._news:
            if not self._closed:
                (self._urgent if urgent else self._others).append(move)
                self._wake.put(None)
                return move
        move.call_off()
        move.step()
        return move

    def hurry(self, move: Move) -> None:
        """Put a queued move before all others."""
        with self._news:
            if move in self._others:
                self._others.remove(move)
                self._urgent.append(move)

    @property
    def is_mover(self) -> bool:
        """True in the mover's own thread, which must not wait for itself."""
        return threading.current_thread() is self._thread

    @property
    def waiting(self) -> int:
        """Moves that have not ended."""
        return len(self._urgent) + len(self._others)

    def drain(self, deadline: float | None = None) -> bool:
        """Wait until nothing is queued, for at most so many seconds; False where something is left."""
        end = None if deadline is None else time.monotonic() + deadline
        with self._news:
            while self._urgent or self._others:
                left = None if end is None else end - time.monotonic()
                if self._closed or (left is not None and left <= 0):
                    return False
                self._news.wait(left)
        return True

    def close(self) -> None:
        """Call everything off and end the thread. Idempotent."""
        with self._news:
            self._closed = True
            self._news.notify_all()
        self._wake.put(None)
        if not self.is_mover:
            self._thread.join()

    def finish(self, last: Callable[[], None]) -> None:
        """The same without waiting: ``last`` is called once nothing runs any more, by the thread as it ends.

        For finalizers: it takes no lock, since a garbage collector runs wherever a thread is.
        """
        self._last.append(last)
        self._closed = True
        self._wake.put(None)
        if self._ended:
            self._do_last()

    def _run(self) -> None:
        while (move := self._next()) is not None:
            if not move.step():
                with self._news:
                    (self._urgent if move in self._urgent else self._others).remove(move)
                    self._news.notify_all()
        self._ended = True
        self._do_last()

    def _next(self) -> Move | None:
        while True:
            with self._news:
                if self._closed:
                    for move in (*self._urgent, *self._others):
                        move.call_off()
                line = self._urgent or self._others
                if line or self._closed:
                    return line[0] if line else None
            self._wake.get()

    def _do_last(self) -> None:
        while self._last:
            try:
                last = self._last.popleft()
            except IndexError:  # the other thread that may call this has taken it
                return
            last()


_living: WeakSet[Mover] = WeakSet()


@atexit.register
def _end_all() -> None:
    """A thread that copies must not be caught by the end of the interpreter."""
    for mover in list(_living):
        mover.close()
