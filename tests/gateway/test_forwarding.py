"""What goes through the gateway comes out unchanged, and every lease comes back."""

from __future__ import annotations

import asyncio
import gzip
import json
import random

import aiohttp
import pytest
from aiohttp import web

from pagein.errors import NeverFits, PageinError, QueueFull
from pagein.gateway.ports import Prepared
from pagein.gateway.relay import Silence
from pagein.protocol import KV_CONVERSATION_HEADER, KV_TENANT_HEADER, PATHS, Capability
from tests.gateway.conftest import Serve
from tests.gateway.fakes import ALL_PATHS, ANSWER, FakeDesk, FakeWorker, begin, die, request_for


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_every_path_is_answered_by_its_worker(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str
) -> None:
    """Each public path reaches the worker, whose bytes and type are the answer."""
    gateway = await serve()
    body, content_type = request_for(path)
    async with gateway.post(path, data=body, headers={"Content-Type": content_type}) as response:
        assert (response.status, await response.read()) == (200, ANSWER)
        assert response.headers["Content-Type"] == "application/json"
        assert response.headers["X-Pagein-Model"] == "m"
    assert await desk.settled() == [200]


@pytest.mark.parametrize("path", [p for p in ALL_PATHS if not p.startswith("/run/")])
async def test_the_body_reaches_the_worker_byte_for_byte(worker: FakeWorker, serve: Serve, path: str) -> None:
    """No field, space or byte of a request is rewritten on its way; ``/rerank`` is only another name."""
    gateway = await serve()
    body, content_type = request_for(path)
    body = body.replace(b'"input"', b'  "tools" : [1e0, "\xc3\xa9"], "input"')
    async with gateway.post(path, data=body, headers={"Content-Type": content_type}):
        pass
    ((got_path, got_body, headers),) = worker.requests
    assert (got_path, got_body) == (PATHS[Capability.RERANK] if path == "/rerank" else path, body)
    assert headers["Content-Type"] == content_type


async def test_the_clients_key_stays_here(worker: FakeWorker, serve: Serve) -> None:
    """The daemon's API key is never passed on to a worker."""
    gateway = await serve(api_key="a-secret-key")
    key = {"Authorization": "Bearer a-secret-key"}
    async with gateway.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=key) as response:
        assert response.status == 200
    assert "Authorization" not in worker.requests[0][2]


async def test_whose_turn_it_is_only_the_daemon_says(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Tenant and conversation that a client claims never reach a worker; those of the daemon do, with each attempt."""
    gateway = await serve()
    claims = {KV_TENANT_HEADER: "another", KV_CONVERSATION_HEADER: "theirs"}
    call = {"model": "m", "prompt": "x"}
    async with gateway.post("/v1/completions", json=call, headers=claims):
        pass
    desk.prepared = Prepared(b"", headers={KV_TENANT_HEADER: "t", "Content-Type": "text/odd"})
    async with gateway.post("/v1/completions", json=call, headers=claims):
        pass
    first, second = (headers for _, _, headers in worker.requests)
    assert not claims.keys() & first.keys()
    assert second[KV_TENANT_HEADER] == "t"
    assert KV_CONVERSATION_HEADER not in second
    assert second["Content-Type"] == "application/json"


async def test_what_a_worker_restored_by_itself_is_told(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Its own counters become the headers that a restore by the daemon has, and are accounted for."""
    timings = {"cache_n": 7, "prompt_n": 2, "prompt_ms": 5.0, "predicted_n": 1, "restored_n": 5}

    async def answer(request: web.Request) -> web.Response:
        told = timings if len(worker.requests) == 1 else {**timings, "cache_n": 0, "restored_n": 0, "miss": "empty: nö"}
        return web.json_response({"choices": [], "timings": told})

    worker.answer = answer
    gateway = await serve()
    call = {"model": "m", "prompt": "x"}
    async with gateway.post("/v1/completions", json=call) as response:
        assert response.headers["X-Pagein-Restored-Tokens"] == "5"
        assert response.headers["X-Pagein-Computed-Tokens"] == "2"
    async with gateway.post("/v1/completions", json=call) as response:
        assert response.headers["X-Pagein-Restored-Tokens"] == "0"
        assert response.headers["X-Pagein-Restore-Miss"] == "empty: n?"
    await desk.settled()
    assert [one.restored for _, one in desk.accounted if one is not None] == [5, 0]


@pytest.mark.parametrize("known_length", [True, False])
async def test_large_answers_pass_unchanged(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, known_length: bool
) -> None:
    """An answer too large to be collected arrives whole, with or without an announced length."""
    big = json.dumps({"x": random.Random(1).randbytes(1_500_000).hex()}).encode()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = len(big) if known_length else None
        await response.prepare(request)
        for start in range(0, len(big), 70_001):
            await response.write(big[start : start + 70_001])
        await response.write_eof()
        return response

    worker.answer = answer
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        assert await response.read() == big
    assert await desk.settled() == [200]


async def test_large_bodies_pass_unchanged(worker: FakeWorker, serve: Serve) -> None:
    """A body above one write reaches the worker whole."""
    body = b'{"model": "m", "input": "' + b"x" * 5_000_000 + b'"}'
    gateway = await serve()
    async with gateway.post("/v1/embeddings", data=body) as response:
        assert response.status == 200
    assert worker.requests[0][1] == body


async def test_compressed_bodies_reach_the_worker_readable(worker: FakeWorker, serve: Serve) -> None:
    """A compressed request is unpacked here, so that workers need not know of it."""
    gateway = await serve()
    body = b'{"model": "m", "input": "x"}'
    headers = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
    async with gateway.post("/v1/embeddings", data=gzip.compress(body), headers=headers) as response:
        assert response.status == 200
    assert worker.requests[0][1] == body
    assert "Content-Encoding" not in worker.requests[0][2]


async def test_compressed_answers_reach_the_client_readable(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A worker that compresses unasked is unpacked here; the announced length is that of what is sent."""
    big = json.dumps({"x": random.Random(2).randbytes(750_000).hex()}).encode()

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return web.Response(body=gzip.compress(big), headers={"Content-Encoding": "gzip"})

    worker.answer = answer
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}, headers={"Accept-Encoding": "gzip"}) as response:
        assert await response.read() == big
        assert "Content-Encoding" not in response.headers
    assert await desk.settled() == [200]


async def test_headers_tell_what_a_request_waited_for(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Queue and load time, and who left for it, stand in the headers of the answer."""
    desk.lease_facts = {"waited_seconds": 1.5, "load_seconds": 1.2, "evicted": ("a", "b")}
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}, headers={"X-Request-Id": "r-1"}) as response:
        told = {k.lower(): v for k, v in response.headers.items() if k.startswith("X-")}
    assert told == {
        "x-request-id": "r-1",
        "x-pagein-model": "m",
        "x-pagein-queue-ms": "1500",
        "x-pagein-load-ms": "1200",
        "x-pagein-evicted": "a, b",
    }
    assert worker.requests[0][2]["X-Request-ID"] == "r-1"


async def test_a_resident_model_shows_no_load(worker: FakeWorker, serve: Serve) -> None:
    """Without a load and an eviction their headers are absent, not zero."""
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        assert "X-Pagein-Load-Ms" not in response.headers
        assert "X-Pagein-Evicted" not in response.headers


@pytest.mark.parametrize(
    ("refusal", "status", "code", "wait"),
    [
        (QueueFull("m", 64, 64), 429, "queue_full", "1"),
        (NeverFits("m", "ram", 100, 50, 60, []), 507, "model_too_large", None),
    ],
)
async def test_refusals_carry_their_numbers(
    desk: FakeDesk, serve: Serve, refusal: PageinError, status: int, code: str, wait: str | None
) -> None:
    """A refused request gets the status, code, numbers and hint of its error, and no lease."""
    desk.refusal = refusal
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], response.headers.get("Retry-After")) == (status, code, wait)
    assert error["message"] == refusal.message
    assert error["hint"] == refusal.hint
    assert refusal.details.items() <= error.items()
    assert await desk.settled() == []


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_a_dead_worker_gives_its_reason(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """A worker that ends before it answers gives 502 with what the desk knows, and the lease back."""
    worker.answer = die
    gateway = await serve()
    body, content_type = request_for(path)
    async with gateway.post(path, data=body, headers={"Content-Type": content_type}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["message"]) == (502, "worker_died", desk.why.message)
    assert await desk.settled() == [502]


async def test_a_worker_that_cannot_be_reached_gives_its_reason(desk: FakeDesk, serve: Serve) -> None:
    """No socket at the endpoint is a dead worker."""
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        assert response.status == 502
    assert await desk.settled() == [502]


async def test_a_worker_that_dies_within_a_small_answer_gives_a_clean_error(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """Half an answer of announced length is replaced by an error, not passed on."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = 1000
        await response.prepare(request)
        await response.write(b'{"half": ')
        assert request.transport is not None
        request.transport.close()
        return response

    worker.answer = half
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (502, "worker_died")
    assert await desk.settled() == [502]


async def test_half_a_long_answer_is_cut_visibly(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Where the beginning is already sent, the client sees a broken connection, never a complete short answer."""

    async def half(request: web.Request) -> web.StreamResponse:
        return await die(request, b'{"half": "', b"x" * 2_000_000, content_type="application/json")

    worker.answer = half
    gateway = await serve()
    with pytest.raises(aiohttp.ClientError):
        async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
            await response.read()
    assert await desk.settled() == [502]


async def test_silence_beyond_the_time_out_ends_the_call(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A worker that sends nothing for the time-out gives 504, and its connection is closed so that it can stop."""
    worker.answer = FakeWorker.silent
    desk.timeout = 1.0
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["timeout_seconds"]) == (504, "worker_timeout", 1.0)
    assert await desk.settled() == [504]
    assert await worker.deserted() == "/v1/embeddings"


async def test_a_worker_that_shows_life_before_its_answer_is_not_silent(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each interim answer starts the time-out anew, so an answer may take longer than it; clients see none."""
    bounds: list[float] = []
    heard, broken = asyncio.Semaphore(0), Silence.broken

    def note(silence: Silence) -> None:
        before = silence._clock.when() or 0
        broken(silence)
        bounds.append((silence._clock.when() or 0) - before)
        heard.release()

    async def slowly(request: web.Request) -> web.Response:
        for _ in range(3):
            await request.writer.write(b"HTTP/1.1 102 Processing\r\n\r\n")
            await heard.acquire()
        request.writer.output_size = 0
        return web.json_response({"data": []})

    monkeypatch.setattr(Silence, "broken", note)
    worker.answer = slowly
    gateway = await serve()
    for _ in range(2):  # on a connection that is used again, too
        bounds.clear()
        async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
            assert (response.status, await response.json()) == (200, {"data": []})
        assert len(bounds) >= 4
        assert min(bounds) > 0
    assert await desk.settled() == [200, 200]


async def test_a_redirect_of_a_worker_is_not_followed(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A worker cannot send the gateway to another address."""

    async def elsewhere(request: web.Request) -> web.Response:
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:1/"})

    worker.answer = elsewhere
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}, allow_redirects=False) as response:
        error = (await response.json())["error"]
        assert (response.status, error["code"], error["status"]) == (502, "bad_worker_answer", 307)
        assert "Location" not in response.headers
    assert len(worker.requests) == 1
    assert await desk.settled() == [502]


async def test_a_fault_of_the_gateway_itself_gives_the_lease_back(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is raised, the client gets a JSON error without a traceback, and the lease comes back."""

    async def broken(*_: object) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr("pagein.gateway.proxy.relay", broken)
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        text = await response.text()
    assert response.status == 500
    assert "internal_error" in text
    assert "secret" not in text
    assert "a secret detail" in caplog.text
    assert await desk.settled() == [500]


async def test_answers_are_not_held_back(worker: FakeWorker, serve: Serve) -> None:
    """The first bytes of a transcript reach the client while the worker still works on the rest."""
    go_on = asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        response = await begin(request, "text/plain")
        await response.write(b"first\n")
        await go_on.wait()
        await response.write(b"second\n")
        await response.write_eof()
        return response

    worker.answer = slow
    gateway = await serve()
    body, content_type = request_for("/v1/audio/transcriptions")
    headers = {"Content-Type": content_type}
    async with gateway.post("/v1/audio/transcriptions", data=body, headers=headers) as response:
        assert await response.content.readline() == b"first\n"
        go_on.set()
        assert await response.content.read() == b"second\n"
