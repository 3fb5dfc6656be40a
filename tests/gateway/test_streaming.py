"""Streams: byte-exact, with heartbeats while a client waits, and never an end without a word."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from pagein.errors import QueueFull
from pagein.gateway.relay import Silence
from tests.gateway.conftest import Serve
from tests.gateway.fakes import EVENTS, STREAM_PATHS, FakeDesk, FakeWorker, RawClient, begin, request_for, stream

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": [], "stream": True}
SOON = 0.001


def error_in(line: bytes) -> dict[str, object]:
    """Return the error of an event."""
    value = json.loads(line.removeprefix(b"data: "))["error"]
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", STREAM_PATHS)
async def test_a_stream_arrives_byte_for_byte(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """Events, usage and the end mark pass as the worker sent them."""
    worker.answer = FakeWorker.events
    gateway = await serve()
    body, content_type = request_for(path, stream=True)
    async with gateway.post(path, data=body, headers={"Content-Type": content_type}) as response:
        assert await response.read() == b"".join(EVENTS)
        assert response.headers["Content-Type"] == "text/event-stream"
        assert response.headers["Cache-Control"] == "no-cache"
        assert response.headers["X-Pagein-Model"] == "m"
    assert await desk.settled() == [200]


@pytest.mark.parametrize("size", [1, 2, 7, 50])
async def test_how_the_worker_cuts_its_stream_does_not_matter(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, size: int
) -> None:
    """Events that arrive in pieces of any size are the same bytes for the client."""
    whole = "".join(f'data: {{"é": {i}}}\r\n\r\n' for i in range(20)).encode() + b"data: [DONE]\n\n"
    worker.answer = lambda request: stream(request, *(whole[i : i + size] for i in range(0, len(whole), size)))
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        assert await response.read() == whole
    assert await desk.settled() == [200]


async def test_each_event_arrives_at_once(worker: FakeWorker, serve: Serve) -> None:
    """A token reaches the client while the worker computes the next one."""
    step = asyncio.Semaphore(0)

    async def stepwise(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for event in EVENTS:
            await step.acquire()
            await response.write(event)
        await response.write_eof()
        return response

    worker.answer = stepwise
    gateway = await serve()
    step.release()
    async with gateway.post(CHAT, json=ASK) as response:
        for event in EVENTS:
            assert await response.content.readuntil(b"\n\n") == event
            step.release()


async def test_a_waiting_client_hears_why(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """While a client waits, comments tell the reason and its place; then the stream follows unchanged."""
    worker.answer = FakeWorker.events
    desk.gate.clear()
    desk.lease_facts = {"waited_seconds": 2.0, "load_seconds": 1.5, "evicted": ("embed",)}
    gateway = await serve(heartbeat=SOON)
    async with gateway.post(CHAT, json=ASK) as response:
        assert response.status == 200
        assert await response.content.readuntil(b"\n\n") == b": waiting for m\n\n"
        on_wait = await desk.asked.get()
        assert on_wait is not None
        on_wait("loading,\nfor 3 s", 1)
        while (heard := await response.content.readuntil(b"\n\n")) == b": waiting for m\n\n":
            pass
        assert heard == b": waiting for m: loading, for 3 s (place 1)\n\n"
        desk.gate.set()
        rest = await response.read()
    facts = b": X-Pagein-Model: m, X-Pagein-Queue-Ms: 2000, X-Pagein-Load-Ms: 1500, X-Pagein-Evicted: embed\n\n"
    before, found, after = rest.partition(facts)
    assert found
    assert set(before.split(b"\n\n")) <= {heard.strip(), b""}
    assert after.endswith(b"".join(EVENTS))
    assert await desk.settled() == [200]


async def test_a_silent_prompt_phase_has_heartbeats_too(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A worker that reads a long prompt before its first byte does not leave the client in silence."""
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        await go_on.wait()
        return await stream(request, *EVENTS)

    worker.answer = slow
    gateway = await serve(heartbeat=SOON)
    async with gateway.post(CHAT, json=ASK) as response:
        assert await response.content.readuntil(b"\n\n") == b": m is working\n\n"
        assert response.headers["X-Pagein-Queue-Ms"] == "0"
        go_on.set()
        assert (await response.read()).endswith(b"".join(EVENTS))
    assert await desk.settled() == [200]


async def test_an_early_refusal_has_its_status(desk: FakeDesk, serve: Serve) -> None:
    """A refusal before the first heartbeat is a plain HTTP error, also for a stream."""
    desk.refusal = QueueFull("m", 5, 5)
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "1")
        assert (await response.json())["error"]["code"] == "queue_full"
    assert await desk.settled() == []


async def test_a_late_refusal_is_an_event(desk: FakeDesk, serve: Serve) -> None:
    """A refusal after the first heartbeat ends the stream with an error event and without [DONE]."""
    desk.refusal = QueueFull("m", 5, 5)
    desk.gate.clear()
    gateway = await serve(heartbeat=SOON)
    async with gateway.post(CHAT, json=ASK) as response:
        await response.content.readuntil(b"\n\n")
        desk.gate.set()
        events = (await response.read()).split(b"\n\n")
    assert error_in(events[-2])["code"] == "queue_full"
    assert events[-1] == b""
    assert await desk.settled() == []


async def test_a_late_failure_of_the_worker_is_an_event(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """The worker's own error answer becomes an event once the stream has begun."""
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({"error": {"message": "no such tool", "code": 400}}, status=400)

    worker.answer = slow
    gateway = await serve(heartbeat=SOON)
    async with gateway.post(CHAT, json=ASK) as response:
        await response.content.readuntil(b"\n\n")
        go_on.set()
        events = (await response.read()).split(b"\n\n")
    assert error_in(events[-2])["message"] == "no such tool"
    assert await desk.settled() == [400]


async def test_a_worker_without_streams_is_named(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """JSON where events were begun is an error event, not garbage in the stream."""
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.Response:
        await go_on.wait()
        return web.json_response({"choices": []})

    worker.answer = slow
    gateway = await serve(heartbeat=SOON)
    async with gateway.post(CHAT, json=ASK) as response:
        await response.content.readuntil(b"\n\n")
        go_on.set()
        events = (await response.read()).split(b"\n\n")
    assert error_in(events[-2])["code"] == "bad_worker_answer"
    assert await desk.settled() == [502]


@pytest.mark.parametrize("torn", [b"", b'data: {"choi', b"data: {}\n"])
async def test_a_death_within_a_stream_is_an_event(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, torn: bytes
) -> None:
    """A worker that dies amid a stream gives an error event with the reason; its torn last event is left out."""
    heard = asyncio.Event()

    async def die_later(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(EVENTS[0])
        await heard.wait()
        if torn:
            await response.write(torn)
        assert request.transport is not None
        request.transport.close()
        return response

    worker.answer = die_later
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        assert await response.content.readuntil(b"\n\n") == EVENTS[0]
        heard.set()
        last, end = (await response.read()).split(b"\n\n")
    assert (error_in(last)["code"], error_in(last)["message"]) == ("worker_died", desk.why.message)
    assert end == b""
    assert await desk.settled() == [502]


async def test_a_stream_that_ends_without_its_mark_is_an_event(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """A regular end before [DONE] is a short answer and is named as one."""
    worker.answer = lambda request: stream(request, EVENTS[0])
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        events = (await response.read()).split(b"\n\n")
    assert error_in(events[-2])["code"] == "worker_died"
    assert await desk.settled() == [502]


async def test_an_error_event_of_the_worker_is_word_enough(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Where the worker itself ends its stream with an error event, none is added."""
    sent = EVENTS[0] + b'data: {"error": {"message": "the cache is full"}}\n\n'
    worker.answer = lambda request: stream(request, sent)
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        assert await response.read() == sent
    assert await desk.settled() == [200]


async def test_silence_within_a_stream_is_an_event(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A worker that falls silent for the time-out is left, and the client is told."""
    worker.answer = FakeWorker.stuck
    desk.timeout = 1.0
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        events = (await response.read()).split(b"\n\n")
    assert error_in(events[-2])["code"] == "worker_timeout"
    assert await desk.settled() == [504]
    assert await worker.deserted() == CHAT


async def test_the_time_out_counts_silence_not_length(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sign of life of the worker starts the time-out anew, so a stream may last longer than it."""
    signs: list[float] = []
    broken = Silence.broken

    def note(silence: Silence) -> None:
        before = silence._clock.when() or 0
        broken(silence)
        signs.append((silence._clock.when() or 0) - before)

    async def stepwise(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        for event in [EVENTS[0]] * 5 + [EVENTS[-1]]:
            await step.acquire()
            await response.write(event)
        return response

    monkeypatch.setattr(Silence, "broken", note)
    step = asyncio.Semaphore(1)
    worker.answer = stepwise
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        for heard in range(1, 7):
            await response.content.readuntil(b"\n\n")
            assert len(signs) >= heard
            step.release()
    assert min(signs) > 0
    assert await desk.settled() == [200]


async def test_a_client_that_stops_reading_loses_its_lease(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Nobody holds a model for ever by not reading: after the time-out the connection is cut."""

    async def flood(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        while True:
            await response.write(b'data: {"x": "' + b"x" * 60_000 + b'"}\n\n')

    worker.answer = flood
    desk.timeout = 1.0
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(CHAT, json.dumps(ASK).encode())
    await client.until(b"\r\n\r\n")
    assert await desk.settled() == [499]
    assert await worker.deserted() == CHAT
    await client.leave()
