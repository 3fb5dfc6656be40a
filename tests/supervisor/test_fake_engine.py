"""The fake engine does as it is told: tests rely on it."""

from __future__ import annotations

import asyncio

import psutil
from tests.workers import ask

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
MIB = 1024**2


async def test_requests_are_held_until_they_are_released(start_worker):
    """A test decides when an answer comes, without sleeping: at its start or in its middle."""
    for switches in (["--hold"], ["--hold", "--hold-after", "2"]):
        child = await start_worker(*switches)
        answers = [asyncio.create_task(ask(child.ready.endpoint, CHAT, HELLO)) for _ in range(2)]
        while (await ask(child.ready.endpoint, "/control/state"))["in_flight"] < 2:
            pass
        await ask(child.ready.endpoint, "/control/release?value=1", {})
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert (len(done), len(waiting)) == (1, 1)
        await ask(child.ready.endpoint, "/control/release", {})
        await asyncio.gather(*answers)
        while (await ask(child.ready.endpoint, "/control/state"))["finished"] < 2:
            pass  # counted after the last byte was sent


async def test_memory_is_really_taken(start_worker):
    """What it allocates shows as resident memory, its grandchild's apart."""
    child = await start_worker("--allocate", "40MiB", "--grandchild", "session", "--grandchild-bytes", "30MiB")
    state = await ask(child.ready.endpoint, "/control/state")
    assert psutil.Process(state["pid"]).memory_info().rss > 40 * MIB
    assert psutil.Process(state["grandchild"]).memory_info().rss > 30 * MIB
    before = psutil.Process(state["pid"]).memory_info().rss
    await ask(child.ready.endpoint, "/control/allocate?value=50MiB", {})
    assert psutil.Process(state["pid"]).memory_info().rss - before > 45 * MIB
