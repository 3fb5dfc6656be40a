"""A client may leave at any moment: the lease comes back exactly once and the worker stops."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from pagein.config.schema import Server
from pagein.gateway.app import make_app, make_runner
from pagein.gateway.metrics import Metrics
from pagein.gateway.proxy import Proxy
from pagein.gateway.upstream import Upstreams
from pagein.gateway.waiting import patiently
from pagein.protocol import PATHS, Capability
from tests.gateway.conftest import NO_HEARTBEAT, Serve
from tests.gateway.fakes import ALL_PATHS, STREAM_PATHS, FakeDesk, FakeWorker, RawClient, begin, eventually, request_for

SOON = 0.001


def worker_path(path: str) -> str:
    """Return the path under which the worker sees a request."""
    return {"/rerank": PATHS[Capability.RERANK], "/run/m": PATHS[Capability.CHAT]}.get(path, path)


async def stuck_in_json(request: web.Request) -> web.StreamResponse:
    """Send the beginning of an answer that is too long to be collected, and then nothing."""
    response = await begin(request, "application/json")
    await response.write(b'{"one": "' + b"x" * 2_000_000)
    await asyncio.Event().wait()
    raise AssertionError


async def next_request(desk: FakeDesk) -> None:
    """Wait until somebody asks for a lease."""
    async with asyncio.timeout(10):
        await desk.asked.get()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL_PATHS)
async def test_leaving_while_waiting(desk: FakeDesk, serve: Serve, path: str, stream: bool) -> None:
    """Who leaves the queue gives the place back and never gets a lease."""
    desk.gate.clear()
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path, stream=stream))
    await next_request(desk)
    await client.leave()
    assert await desk.settled() == []
    assert desk.given_up == 1


@pytest.mark.parametrize("path", STREAM_PATHS)
async def test_leaving_after_a_heartbeat(desk: FakeDesk, serve: Serve, path: str) -> None:
    """A client that has heard heartbeats leaves the queue as any other."""
    desk.gate.clear()
    gateway = await serve(heartbeat=SOON)
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path, stream=True))
    await client.until(b": waiting")
    await client.leave()
    assert await desk.settled() == []
    assert desk.given_up == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ALL_PATHS)
async def test_leaving_while_the_worker_computes(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str, stream: bool
) -> None:
    """Before the first byte of an answer: the worker's connection is closed, the lease is given back once."""
    worker.answer = FakeWorker.silent
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path, stream=stream))
    await worker.busy()
    await client.leave()
    assert await desk.settled() == [499]
    assert await worker.deserted() == worker_path(path)


@pytest.mark.parametrize("path", STREAM_PATHS)
async def test_leaving_after_a_heartbeat_of_the_worker(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str
) -> None:
    """The same when the wait for the first byte had heartbeats."""
    worker.answer = FakeWorker.silent
    gateway = await serve(heartbeat=SOON)
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path, stream=True))
    await client.until(b": m is working")
    await client.leave()
    assert await desk.settled() == [499]
    assert await worker.deserted() == worker_path(path)


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_leaving_in_the_middle_of_an_answer(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """After the first bytes of an answer: the same."""
    worker.answer = FakeWorker.stuck if path in STREAM_PATHS else stuck_in_json
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path, stream=True))
    await client.until(b"one")
    await client.leave()
    assert await desk.settled() == [499]
    assert await worker.deserted() == worker_path(path)


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_leaving_within_the_body(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """A request that never arrives whole takes no lease and reaches no worker."""
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path), cut=5)
    await client.leave()
    async with gateway.get("/health") as response:
        assert response.status == 200
    assert await desk.settled_or_untouched() == []
    assert worker.requests == []


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_leaving_after_the_answer(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """Who leaves after the last byte changes nothing: the lease came back with 200."""
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(path, *request_for(path))
    await client.until(b'"ok"')
    assert await desk.settled() == [200]
    await client.leave()
    async with gateway.get("/health") as response:
        assert response.status == 200
    assert await desk.settled() == [200]


@pytest.mark.parametrize("stage", ["waiting", "computing", "streaming", "listening"])
async def test_stopping_the_server_gives_everything_back(desk: FakeDesk, worker: FakeWorker, stage: str) -> None:
    """A server that stops ends its open requests: no lease stays out, no worker goes on, the stop does not hang."""
    if stage == "waiting":
        desk.gate.clear()
    worker.answer = FakeWorker.stuck if stage == "streaming" else FakeWorker.silent
    runner = make_runner(make_app(desk, Server(heartbeat=NO_HEARTBEAT), "1"), grace=0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = await RawClient.connect(runner.addresses[0][1])
    path = PATHS[Capability.CHAT]
    if stage == "listening":
        await client.send("/api/events", b"", method="GET")
        await client.until(b": listening")
    else:
        await client.send(path, *request_for(path, stream=True))
        await (next_request(desk) if stage == "waiting" else worker.busy())
        if stage == "streaming":
            await client.until(b"one")
    async with asyncio.timeout(10):
        await runner.cleanup()
    await client.rest()
    await client.leave()
    assert await desk.settled_or_untouched() == ([499] if stage in ("computing", "streaming") else [])
    assert desk.waiting == len(desk.streams) == 0


async def test_a_grant_in_the_moment_of_leaving_is_given_back(desk: FakeDesk, serve: Serve) -> None:
    """A lease that is granted while its client leaves is not lost."""
    proxy = Proxy(desk, Upstreams(), Metrics(desk), Server(heartbeat=NO_HEARTBEAT))
    desk.gate.clear()
    acquiring = desk.acquire("m", Capability.CHAT)
    waiting = asyncio.create_task(
        patiently(acquiring, None, NO_HEARTBEAT, lambda: "", proxy._give_back_unused)  # type: ignore[arg-type]
    )
    await next_request(desk)
    desk.gate.set()
    await eventually(lambda: bool(desk.granted))  # granted now, and the one who waits for it has not run yet
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await desk.settled() == [499]


async def finished_but_open(request: web.Request) -> web.StreamResponse:
    """Send a whole stream with its mark, and do not end the answer."""
    response = await begin(request, "text/event-stream")
    await response.write(b'data: {"one": 1}\n\ndata: [DONE]\n\n')
    await asyncio.Event().wait()
    raise AssertionError


async def test_leaving_at_the_mark_of_the_end_is_an_answered_request(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """Many clients close there: they have their whole answer, and the worker did its work."""
    worker.answer = finished_but_open
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    path = PATHS[Capability.CHAT]
    await client.send(path, *request_for(path, stream=True))
    await client.until(b"[DONE]")
    await client.leave()
    assert await desk.settled() == [200]
