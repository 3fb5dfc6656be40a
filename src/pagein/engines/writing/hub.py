"""The one thread in which a streamed model computes: requests in step, and changes of the model between them."""

from __future__ import annotations

import threading
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from pagein.engines.local.compute import Computed, hand_over
from pagein.weights.steps.lockstep import Lockstep, Seat
from pagein.weights.streaming.randomness import random_state

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Errand:
    """Work on the model itself."""

    act: Callable[[], None]
    when_idle: bool
    """Only once every request that was there before has ended; else between two passes of those that run."""


class Hub:
    """Runs a `Lockstep` in a daemon thread, in the order of asking."""

    def __init__(self, lockstep: Lockstep, on_fault: Callable[[str], None]) -> None:
        """``on_fault`` is told, in a thread of its own, when the thread cannot go on."""
        self._lockstep, self._on_fault = lockstep, on_fault
        self._coming: deque[Seat[Any] | _Errand] = deque()
        self._news = threading.Condition()
        self._stopped = False
        self.beats = 0
        """Steps computed since the start: a block of a streamed model, a pass of one in memory."""
        self._last: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)

    def start(self) -> None:
        """Begin to compute."""
        self._thread.start()

    def submit(
        self,
        job: Callable[[], T],
        tokens: int,
        on_end: Callable[[Seat[T]], None],
        admitted: Callable[[], bool] | None = None,
    ) -> Seat[T]:
        """Queue a request of so many tokens; any thread. ``on_end`` is called in the compute thread, ``admitted`` too.

        It joins once ``admitted`` says so, in the order of coming; without it once so many tokens of KV are free.
        """
        seat = Seat(job, tokens, on_end)
        seat.admitted = admitted
        seat.rng = random_state()  # the job seeds it for itself; others must not see what it draws
        self._put(seat)
        return seat

    def cancel(self, seat: Seat[Any]) -> None:
        """Let a request go at its next block; any thread, and harmless once it has ended."""
        self._lockstep.cancel(seat)

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> Computed[T]:
        """Run work once all that was asked for before has ended; what comes later waits for it."""
        return await self._await(work, when_idle=True)

    async def between(self, work: Callable[[], T]) -> T:
        """Run work as soon as all requests stand between two passes; they go on afterwards."""
        return (await self._await(lambda _: work(), when_idle=False)).value

    def stop(self, last: Callable[[], None] | None = None, bound: float = 0.0) -> None:
        """End the thread after the block that it computes now; with ``last`` requests are let go, then that is done.

        Waits at most ``bound`` seconds for it.
        """
        self._last = self._last or last
        self._stopped = True
        with self._news:
            self._news.notify()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(bound)

    async def _await(self, work: Callable[[Callable[[], bool]], T], *, when_idle: bool) -> Computed[T]:
        return await hand_over(work, lambda act: self._put(_Errand(act, when_idle)))

    def _put(self, what: Seat[Any] | _Errand) -> None:
        with self._news:
            self._coming.append(what)
            self._news.notify()

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread; a request's own switch would leak into others between two steps
        try:
            while not self._stopped:
                self._take_in()
                if not self._lockstep.turn():
                    self._rest()
                self.beats += 1
            if self._last is not None:
                self._lockstep.end()
                self._last()
        except Exception as error:
            traceback.print_exc()
            why = f"its compute thread broke: {type(error).__name__}: {error}"
            threading.Thread(target=self._on_fault, args=(why,), daemon=True).start()

    def _take_in(self) -> None:
        while self._coming:
            what = self._coming[0]
            if isinstance(what, Seat):
                self._lockstep.put(what)
            elif what.when_idle and not self._lockstep.is_idle:
                return
            else:
                self._lockstep.settle()
                what.act()
            self._coming.popleft()

    def _rest(self) -> None:
        with self._news:
            while not self._coming and not self._stopped:
                self._news.wait()
