"""The one thread that moves blocks between tiers: in small steps, so that what a turn waits for goes first."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

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
        self._closed = False
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
                self._news.notify_all()
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
            for move in (*self._urgent, *self._others):
                move.call_off()
            self._news.notify_all()
        if not self.is_mover:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._news:
                while not (self._urgent or self._others or self._closed):
                    self._news.wait()
                line = self._urgent or self._others
                if not line:
                    return
                move = line[0]
            if not move.step():
                with self._news:
                    (self._urgent if move in self._urgent else self._others).remove(move)
                    self._news.notify_all()
