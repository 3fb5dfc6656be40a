"""The compute thread."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pagein.engines.local.compute import ComputeThread


async def test_results_and_errors_come_back():
    """What the work returns or raises reaches the one who asked, and the thread lives on."""
    thread = ComputeThread()

    def fail(_):
        raise KeyError("x")

    with pytest.raises(KeyError):
        await thread.run(fail)
    assert (await thread.run(lambda _: 7)).value == 7
    thread.stop()


async def test_work_that_has_begun_learns_that_nobody_waits():
    """Cancelling cannot stop running work, but `abandoned` turns true for it."""
    thread, begun, told = ComputeThread(), threading.Event(), threading.Event()

    def work(abandoned):
        begun.set()
        while not abandoned():
            threading.Event().wait(0.001)
        told.set()

    asked = asyncio.create_task(thread.run(work))
    await asyncio.to_thread(begun.wait)
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert await asyncio.to_thread(told.wait, 10)
    thread.stop()


async def test_work_that_has_not_begun_is_dropped():
    """Cancelled before its turn, work is never done."""
    thread, hold, done = ComputeThread(), threading.Event(), []
    first = asyncio.create_task(thread.run(lambda _: hold.wait()))
    second = asyncio.create_task(thread.run(lambda _: done.append("second")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    hold.set()
    await first
    await thread.run(lambda _: done.append("third"))
    assert done == ["third"]
    thread.stop()
