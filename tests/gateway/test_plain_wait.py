"""Clients that do not stream wait silently, so their wait can be bounded (scenario 19)."""

from __future__ import annotations

import asyncio

import pytest

from pagein.errors import WaitTooLong
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import EVENTS, FakeDesk, FakeWorker

CHAT = "/v1/chat/completions"
SOON = 0.001


async def ask_until_told(
    desk: FakeDesk, gateway: Served, reason: str, position: int
) -> tuple[int, str, dict[str, object]]:
    """Send a plain request, tell it what it waits for, and return what it is answered."""
    async with asyncio.timeout(10):
        asking = asyncio.create_task(gateway.post(CHAT, json={"model": "m"}).__aenter__())
        on_wait = await desk.asked.get()
        assert on_wait is not None
        on_wait(reason, position)
        response = await asking
        body = await response.json()
    return response.status, response.headers["Retry-After"], body["error"]


async def test_it_is_told_to_come_back(desk: FakeDesk, serve: Serve) -> None:
    """503 with Retry-After, the reason and the place; the place in the queue is given back."""
    desk.gate.clear()
    gateway = await serve(plain_wait=0.05)
    status, retry, error = await ask_until_told(desk, gateway, "embed is in use", 3)
    assert (status, retry, error["code"]) == (503, "5", "wait_timeout")
    assert (error["position"], error["reason"]) == (3, "embed is in use")
    assert "embed is in use" in str(error["message"])
    assert "server.plain_wait" in str(error["hint"])
    assert await desk.settled() == []
    assert desk.given_up == 1


@pytest.mark.parametrize(
    ("facts", "retry"),
    [
        ({"state": "loading", "load_seconds": 41.5}, "42"),
        ({"state": "loading", "load_seconds": 0.01}, "1"),
        ({"state": "loading", "load_seconds": None}, "5"),
        ({"state": "absent", "load_seconds": 41.5}, "5"),
    ],
)
async def test_a_known_load_tells_when_to_come_back(
    desk: FakeDesk, serve: Serve, facts: dict[str, object], retry: str
) -> None:
    """The rest of what the last load took, where one is on its way."""
    desk.gate.clear()
    desk.view_facts = facts
    gateway = await serve(plain_wait=SOON)
    async with gateway.post(CHAT, json={"model": "m"}) as response:
        assert (response.status, response.headers["Retry-After"]) == (503, retry)


async def test_a_stream_is_not_bounded_by_it(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Heartbeats keep its connection alive, so it waits on."""
    worker.answer = FakeWorker.events
    desk.gate.clear()
    gateway = await serve(plain_wait=SOON, heartbeat=SOON)
    async with gateway.post(CHAT, json={"model": "m", "stream": True}) as response:
        for _ in range(5):
            assert await response.content.readuntil(b"\n\n") == b": waiting for m\n\n"
        desk.gate.set()
        assert (await response.read()).endswith(b"".join(EVENTS))


async def test_the_longest_wait_tells_the_place_too(desk: FakeDesk, serve: Serve) -> None:
    """An error of the desk gets the place that the desk told before; one that it has itself stays."""
    desk.gate.clear()
    desk.refusal = WaitTooLong("m", 300.0, "memory is held by a")
    gateway = await serve()
    asking = asyncio.create_task(gateway.post(CHAT, json={"model": "m"}).__aenter__())
    async with asyncio.timeout(10):
        on_wait = await desk.asked.get()
        assert on_wait is not None
        on_wait("something older", 2)
        desk.gate.set()
        error = (await (await asking).json())["error"]
    assert (error["position"], error["reason"], error["retry_after"]) == (2, "memory is held by a", 5)
