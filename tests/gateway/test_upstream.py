"""Connections to workers are kept, replaced and never trusted blindly."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from aiohttp import web

from pagein.protocol import SILENCE_HEADER, Endpoint
from tests.gateway.conftest import Serve
from tests.gateway.fakes import ANSWER, FakeDesk, FakeWorker, die

EMBED = "/v1/embeddings"
ASK = {"model": "m"}


async def test_connections_are_kept(worker: FakeWorker, serve: Serve) -> None:
    """Requests one after another use one connection, errors and streams included."""
    gateway = await serve()

    async def fail(request: web.Request) -> web.Response:
        return web.json_response({"error": {}}, status=418)

    for answer in (None, fail, FakeWorker.events, None):
        worker.answer = answer
        async with gateway.post("/v1/chat/completions", json={**ASK, "stream": True}) as response:
            await response.read()
    assert len(worker.requests) == 4
    assert len(worker.connections) == 1


async def test_a_worker_is_told_of_a_short_silence(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Only where its own habit of showing life would be too slow; nothing of a client's gets there."""
    gateway = await serve()
    for desk.timeout in (300.0, 45.0, 44.0, 2.5):
        async with gateway.post(EMBED, json=ASK, headers={SILENCE_HEADER: "1"}) as response:
            assert response.status == 200
    told = [headers.get(SILENCE_HEADER) for _, _, headers in worker.requests]
    assert told == [None, None, "44", "2.5"]


async def test_a_kept_connection_that_the_worker_just_closed_is_replaced(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """A reused connection that ends without a byte of answer was stale: the call is sent again."""

    async def once(request: web.Request) -> web.StreamResponse:
        if len(worker.requests) == 2:
            return await die(request)
        return await worker.plain(request)

    worker.answer = once
    gateway = await serve()
    for _ in range(2):
        async with gateway.post(EMBED, json=ASK) as response:
            assert (response.status, await response.read()) == (200, ANSWER)
    assert len(worker.requests) == 3
    assert await desk.settled() == [200, 200]


async def test_a_new_connection_that_ends_is_a_death(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """On a fresh connection the worker did get the call: it is not sent twice."""
    worker.answer = die
    gateway = await serve()
    async with gateway.post(EMBED, json=ASK) as response:
        assert response.status == 502
    assert len(worker.requests) == 1
    assert await desk.settled() == [502]


async def test_a_worker_that_dies_on_every_call_is_not_asked_for_ever(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """However many stale connections there are, the attempts are bounded and the end is an error."""
    together = asyncio.Event()

    async def gather(request: web.Request) -> web.StreamResponse:
        if len(worker.requests) == 8:
            together.set()
        await together.wait()
        return await worker.plain(request)

    async def ask() -> int:
        async with gateway.post(EMBED, json=ASK) as response:
            return int(response.status)

    worker.answer = gather
    gateway = await serve()
    assert await asyncio.gather(*(ask() for _ in range(8))) == [200] * 8
    worker.answer = die
    assert await ask() == 502
    assert 8 < len(worker.requests) <= 11
    assert len(await desk.settled()) == 9


async def test_a_reloaded_worker_is_reached_at_its_new_place(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """When a model comes back at another endpoint, the old connections are left."""
    gateway = await serve()
    async with gateway.post(EMBED, json=ASK) as response:
        assert response.status == 200
    fresh = FakeWorker()
    runner = web.AppRunner(fresh.app(), access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    with tempfile.TemporaryDirectory(prefix="pagein-") as folder:
        await web.UnixSite(runner, str(Path(folder) / "w")).start()
        desk.endpoint = Endpoint(socket=str(Path(folder) / "w"))
        async with gateway.post(EMBED, json=ASK) as response:
            assert response.status == 200
        await runner.cleanup()
    assert (len(worker.requests), len(fresh.requests)) == (1, 1)


async def test_a_worker_on_a_port_is_reached(desk: FakeDesk, serve: Serve) -> None:
    """Engines without Unix sockets answer on a loopback port."""
    fake = FakeWorker()
    runner = web.AppRunner(fake.app(), access_log=None, shutdown_timeout=0.01)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    desk.endpoint = Endpoint(host="127.0.0.1", port=runner.addresses[0][1])
    gateway = await serve()
    async with gateway.post(EMBED, json=ASK) as response:
        assert await response.read() == ANSWER
    await runner.cleanup()
    assert len(fake.requests) == 1
