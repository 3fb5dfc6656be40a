"""What is no answer is never passed on as one: every kind of nonsense, on a connection written by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest

from pagein.errors import BadAnswer
from pagein.gateway import answers
from pagein.protocol import Endpoint
from tests.fake_garbage import EVENT, FIXED, GOOD, events, whole
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk

CHAT = "/v1/chat/completions"
ASK = {"model": "m", "messages": []}
EMBEDDING = whole(b'{"data": []}')

BAD, DIED = (502, "bad_worker_answer"), (502, "worker_died")
WHOLE = {
    "text": BAD, "half-json": BAD, "html": BAD, "null": BAD, "empty": BAD, "no-content": BAD,
    "bad-sse": BAD, "bad-event": BAD, "no-done": BAD, "false-done": BAD, "torn-event": BAD, "bad-chunk": BAD,
    "json-stream": (200, None), "close": DIED, "not-http": BAD, "half-head": DIED,
    "length-too-long": DIED, "length-too-short": BAD, "length-nonsense": BAD, "two-lengths": BAD, "long-header": BAD,
    "bad-gzip": DIED, "redirect": BAD, "switch": BAD, "odd-status": BAD,
    "error-page": (500, "worker_error"), "bad-request-page": (400, "worker_error"),
}  # fmt: skip
"""What a request that asks for JSON gets: status and code."""
STREAMED = {
    **WHOLE,
    "bad-sse": (200, "bad_worker_answer"), "bad-event": (200, "bad_worker_answer"), "no-done": (200, "worker_died"),
    "false-done": (200, "worker_died"), "torn-event": (200, "worker_died"),
    "json-stream": BAD, "length-too-long": BAD, "bad-gzip": BAD,
}  # fmt: skip
"""What a request that asks for events gets; 200 = headers were sent, and the code is that of the last event."""


class RawWorker:
    """Answers every request with the next bytes of a list (the last ones again and again), written by hand."""

    def __init__(self) -> None:
        self.answers: list[bytes] = []
        self.asked = 0
        self.keep = False
        self.go_on = asyncio.Event()
        self.rest: asyncio.Queue[bytes] = asyncio.Queue()
        """Written to the first connection after an answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(self.answers[min(self.asked, len(self.answers) - 1)])
                self.asked += 1
                await writer.drain()
                if not self.keep:
                    break
                while not self.rest.empty():
                    await self.go_on.wait()
                    writer.write(self.rest.get_nowait())
        writer.close()


@pytest.fixture
async def raw(desk: FakeDesk) -> AsyncIterator[RawWorker]:
    """A worker written by hand behind the desk."""
    worker = RawWorker()
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        path = str(Path(folder) / "w")
        async with await asyncio.start_unix_server(worker.serve, path):
            desk.endpoint = Endpoint(socket=path)
            yield worker


@pytest.mark.parametrize("kind", FIXED)
async def test_nonsense_where_json_is_due(desk: FakeDesk, raw: RawWorker, serve: Serve, kind: str) -> None:
    """Each kind gives a JSON error with its status, names the model, and gives the lease back with that status."""
    raw.answers = [FIXED[kind]]
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        value = await response.json()
    status, code = WHOLE[kind]
    assert (response.status, value.get("error", {}).get("code")) == (status, code)
    assert await desk.settled() == [status]
    if status != 200:
        assert raw.asked == 1
    if code == "bad_worker_answer":
        assert "'m'" in value["error"]["message"]
        assert value["error"]["message"].isprintable()


@pytest.mark.parametrize("kind", FIXED)
async def test_nonsense_where_events_are_due(desk: FakeDesk, raw: RawWorker, serve: Serve, kind: str) -> None:
    """Before the headers a status, after them an error event as the last word: never a bare end, never [DONE]."""
    raw.answers = [FIXED[kind]]
    gateway = await serve()
    async with gateway.post(CHAT, json={**ASK, "stream": True}) as response:
        body = await response.read()
    status, code = STREAMED[kind]
    assert response.status == status
    assert b"[DONE]\n" not in body
    last = body if status != 200 else body.split(b"\n\n")[-2].removeprefix(b"data: ")
    assert json.loads(last)["error"]["code"] == code
    assert await desk.settled() == [status if status != 200 else 502]


async def test_an_answer_says_what_came_instead(raw: RawWorker, serve: Serve) -> None:
    """The beginning of the nonsense stands in the error, fit to print."""
    gateway = await serve()
    for kind, told in [
        ("html", "It works! [31mred"),
        ("half-json", 'not valid JSON (Unterminated string starting at: line 1 column 31 (char 30)): {"object"'),
        ("redirect", "status 307"),
        ("not-http", "did not answer in HTTP"),
        ("error-page", "It works!"),
    ]:
        raw.answers, raw.asked = [FIXED[kind]], 0
        async with gateway.post(CHAT, json=ASK) as response:
            assert told in (await response.json())["error"]["message"]


async def test_json_under_another_name_is_called_json(raw: RawWorker, serve: Serve) -> None:
    """The body decides: engines that forget the type are understood, and their clients are told it."""
    raw.answers = [whole(GOOD, "text/html")]
    gateway = await serve()
    async with gateway.post(CHAT, json=ASK) as response:
        assert (response.status, response.content_type, await response.read()) == (200, "application/json", GOOD)


@pytest.mark.parametrize("late", [False, True])
async def test_bytes_after_an_answer_are_not_the_next_answer(
    desk: FakeDesk, raw: RawWorker, serve: Serve, late: bool
) -> None:
    """A second answer that nobody asked for, at once or while the connection rests, reaches no other client."""
    raw.keep = True
    raw.answers = [EMBEDDING if late else EMBEDDING + whole(GOOD), EMBEDDING]
    if late:
        raw.rest.put_nowait(whole(GOOD))
    gateway = await serve()
    for _ in range(3):
        async with gateway.post("/v1/embeddings", json={"model": "m", "input": "x"}) as response:
            assert (response.status, await response.json()) == (200, {"data": []})
        raw.go_on.set()
        while not raw.rest.empty():
            await asyncio.sleep(0)
    assert await desk.settled() == [200] * 3


@pytest.mark.parametrize(("count", "status"), [(100, 200), (101, 502)])
async def test_interim_answers_are_bounded(
    desk: FakeDesk, raw: RawWorker, serve: Serve, count: int, status: int
) -> None:
    """Some servers show life by them; a flood is ended at once, and named."""
    raw.answers = [b"HTTP/1.1 102 Processing\r\n\r\n" * count + EMBEDDING]
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m", "input": "x"}) as response:
        body = await response.text()
    assert response.status == status
    assert ("more than 100 interim answers" in body) == (status == 502)
    assert await desk.settled() == [status]


async def test_a_reused_connection_that_answers_nonsense_is_not_asked_again(
    desk: FakeDesk, raw: RawWorker, serve: Serve
) -> None:
    """Only an idle connection that was closed is replaced; where the worker answered, the call is not sent twice."""
    raw.keep = True
    raw.answers = [EMBEDDING, b"nonsense\r\n\r\n"]
    gateway = await serve()
    for status in (200, 502):
        async with gateway.post("/v1/embeddings", json={"model": "m", "input": "x"}) as response:
            assert response.status == status
    assert raw.asked == 2
    assert await desk.settled() == [200, 502]


async def test_a_stream_is_over_with_its_mark(desk: FakeDesk, raw: RawWorker, serve: Serve) -> None:
    """A worker that goes on after [DONE], or leaves the connection open, does not hold up its client."""
    raw.keep = True
    raw.answers = [events(EVENT, b"data: [DONE]\n\n" + EVENT, EVENT, end=False)]
    gateway = await serve()
    async with gateway.post(CHAT, json={**ASK, "stream": True}) as response:
        assert await response.read() == EVENT + b"data: [DONE]\n\n"
    assert await desk.settled() == [200]


@pytest.mark.parametrize("end", [b'"}', b'"'])
async def test_a_long_answer_that_is_cut_is_not_whole_for_the_client(
    desk: FakeDesk, raw: RawWorker, serve: Serve, end: bytes
) -> None:
    """Beyond what is collected the last piece passes only when it ends as JSON does; its announced length is kept."""
    body = b'{"x": "' + b"x" * 3_000_000 + end
    raw.answers = [whole(body)]
    gateway = await serve()
    cut = pytest.raises(aiohttp.ClientError) if end == b'"' else contextlib.nullcontext()
    with cut:
        async with gateway.post(CHAT, json=ASK) as response:
            assert await response.read() == body
    assert await desk.settled() == [502 if end == b'"' else 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_is_endless(
    desk: FakeDesk, raw: RawWorker, serve: Serve, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above the stated length an answer ends with an error, whether it was announced or only kept coming."""
    monkeypatch.setattr(answers, "LARGEST", 2 * 1024**2)
    raw.answers = [events(*[EVENT] * 30_000) if stream else whole(b"{" + b" " * 3_000_000)]
    gateway = await serve()
    async with gateway.post(CHAT, json={**ASK, "stream": stream}) as response:
        body = await response.read()
    last = body.split(b"\n\n")[-2].removeprefix(b"data: ") if stream else body
    assert "sent more than 2.0 MiB" in json.loads(last)["error"]["message"]
    assert await desk.settled() == [502]


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (answers.check_json, b'{"a": 1}', b"{} {}"),
        (answers.check_json, b"[1]\n", b"1"),
        (answers.check_json, b'{"a": "\\ud83d", "b": NaN}', b"\xff{}"),
        (answers.check_json, b"{" + b" " * 70_000 + b"}", b"{" + b" " * 70_000),
        (answers.check_json, b"[" * 100 + b"]" * 100, b"[" * 60_000),
        (answers.check_json_start, b" \n{", b"<html>"),
        (answers.check_json_end, b"}\n ", b"x"),
    ],
)
def test_what_counts_as_json(check: Callable[[str, bytes], None], good: bytes, bad: bytes) -> None:
    """An object or a list, whole; half an emoji and NaN, which engines send, are let through."""
    check("m", good)
    with pytest.raises(BadAnswer, match="the worker of 'm'"):
        check("m", bad)
