"""The one thread in which a worker computes, so that working memory and cores are used by one request at a time."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Computed(Generic[T]):
    """A result with the seconds that it waited for the thread and that it took in it."""

    value: T
    waited: float
    took: float


class ComputeThread:
    """Runs work in the order of asking. A daemon thread: the end of the process does not wait for it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="compute", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> Computed[T]:
        """Run ``work(abandoned)`` in the thread and wait for it; called on an event loop.

        Cancelling drops work that has not started; work that has is told by ``abandoned()`` turning true.
        """
        return await hand_over(work, self._jobs.put)

    def stop(self) -> None:
        """End the thread after the work that it does now; what still waits is never done."""
        self._jobs.put(None)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


async def hand_over(work: Callable[[Callable[[], bool]], T], put: Callable[[Callable[[], None]], None]) -> Computed[T]:
    """Give ``work(abandoned)`` to another thread by ``put``, and wait for it on the event loop of the caller.

    Cancelling drops work that has not started; work that has is told by ``abandoned()`` turning true.
    """
    left = threading.Event()
    future: Future[Computed[T]] = Future()
    asked = time.monotonic()

    def job() -> None:
        if not future.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            value = work(left.is_set)
        except BaseException as error:  # whatever it is, it belongs to the one who asked
            future.set_exception(error)
        else:
            future.set_result(Computed(value, began - asked, time.monotonic() - began))

    put(job)
    try:
        return await asyncio.wrap_future(future)
    finally:
        left.set()
