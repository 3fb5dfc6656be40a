"""Chats whose history the server keeps: the header `X-Pagein-Session`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from aiohttp import web

from pagein.errors import SessionBusy
from pagein.gateway.turnstile import Turnstile
from pagein.history import Span
from pagein.sessions.store import SessionStore
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker, RawClient, begin, stream
from tests.gateway.talkers import DONE, chunk, client_of, echo, messages, whole

ANY = 10**9


def talking(client: openai.AsyncOpenAI, name: str = "talk") -> openai.AsyncOpenAI:
    """Return the client, with the header of a session."""
    return client.with_options(default_headers={"X-Pagein-Session": name})


def user(text: str) -> list[dict[str, str]]:
    """Return one message."""
    return [{"role": "user", "content": text}]


async def say(client: openai.AsyncOpenAI, text: str, **more: Any) -> str:
    """Say one thing and return the answer."""
    got = await client.chat.completions.create(model="m", messages=user(text), **more)  # type: ignore[call-overload]
    return str(got.choices[0].message.content)


async def kept(sessions: SessionStore, name: str = "talk") -> list[dict[str, Any]]:
    """Return the messages that are kept of a session."""
    past = await sessions.past_of_session(sessions.tenant_of(None), name, ANY)
    return [dict(entry.body) for entry in past.entries] if past is not None else []


async def test_the_server_remembers(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The model sees what was said before and the new message; another name begins anew."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    assert await say(talking(client), "one") == "1:one"
    assert await say(talking(client), "two") == "3:two"
    assert messages(worker) == [("user", "one"), ("assistant", "1:one"), ("user", "two")]
    assert await say(talking(client, "other"), "three") == "1:three"
    assert await say(client, "four") == "1:four"
    assert [message["content"] for message in await kept(sessions)] == ["one", "1:one", "two", "3:two"]


async def test_a_stream_passes_unchanged_and_is_kept(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The client gets the worker's bytes, and the pieces are kept as one message with its tool calls."""
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a"'}}
    pieces = [
        chunk({"role": "assistant", "content": "he"}), chunk({"content": "llo"}), chunk({"tool_calls": [call]}),
        chunk({"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]}), chunk({}, "tool_calls"), DONE,
    ]  # fmt: skip
    worker.answer = lambda request: stream(request, *pieces)
    gateway = await serve(sessions)
    body = {"model": "m", "messages": user("x"), "stream": True}
    async with gateway.post("/v1/chat/completions", json=body, headers={"X-Pagein-Session": "talk"}) as response:
        assert await response.read() == b"".join(pieces)
        assert response.headers["X-Pagein-History"] == "0"
        assert response.headers["X-Pagein-Conversation"].startswith("sess_")
    function = {"name": "f", "arguments": '{"a": 1}'}
    tool_calls = [{"id": "c1", "type": "function", "function": function}]
    assert (await kept(sessions))[1] == {"role": "assistant", "content": "hello", "tool_calls": tool_calls}


async def test_messages_are_sent_again_as_they_came(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """Content parts and names are kept verbatim; what the engine said as null is not sent back to it."""
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:x"}}]
    message = {"role": "user", "name": "me", "content": parts}

    async def answer(request: web.Request) -> web.Response:
        return whole({"content": "yes", "refusal": None, "tool_calls": None})

    worker.answer = answer
    client = talking(client_of(await serve(sessions)))
    await client.chat.completions.create(model="m", messages=[message])  # type: ignore[list-item]
    await say(client, "more")
    sent = json.loads(worker.requests[-1][1])["messages"]
    assert sent == [message, {"role": "assistant", "content": "yes"}, *user("more")]


async def test_a_system_message_is_not_said_twice(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A client that sends its system message with each turn has it in the history once."""
    worker.answer = echo
    client = talking(client_of(await serve(sessions)))
    for text in ("one", "two"):
        turn = [{"role": "system", "content": "Be brief"}, *user(text)]
        await client.chat.completions.create(model="m", messages=turn)  # type: ignore[arg-type]
    assert [role for role, _ in messages(worker)] == ["system", "user", "assistant", "user"]


async def test_run_takes_part(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The one path for every model keeps a session too."""
    worker.answer = echo
    gateway = await serve(sessions)
    for count, text in ((1, "one"), (3, "two")):
        headers = {"X-Pagein-Session": "talk"}
        async with gateway.post("/run/m", json={"input": text}, headers=headers) as response:
            answer = await response.json()
        assert answer["choices"][0]["message"]["content"] == f"{count}:{text}"


async def test_two_turns_at_once_are_ordered(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The second turn waits for the first, with heartbeats, and both end as their serial run would."""
    arrived, go = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        if not arrived.is_set():
            arrived.set()
            await go.wait()
        return await echo(request)

    worker.answer = slow
    gateway = await serve(sessions, heartbeat=0.001)
    first = asyncio.create_task(say(talking(client_of(gateway)), "one"))
    await arrived.wait()
    body = {"model": "m", "messages": user("two"), "stream": True}
    headers = {"X-Pagein-Session": "talk"}
    async with gateway.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert b"waiting for the turn before" in await response.content.readline()
        go.set()
        rest = await response.text()
    assert await first == "1:one"
    assert rest.rstrip().endswith("[DONE]")
    assert [m["content"] for m in await kept(sessions)] == ["one", "1:one", "two", "3:two"]


async def test_a_line_is_bounded() -> None:
    """No more turns wait than may, none longer than it may, and one that gave up leaves its place."""
    gate = Turnstile(longest_line=1, longest_wait=0.01)
    end = await gate.enter("k", "talk")
    with pytest.raises(SessionBusy, match="not over within"):
        await gate.enter("k", "talk")
    patient = Turnstile(longest_line=1)
    first = await patient.enter("k", "talk")
    second = asyncio.create_task(patient.enter("k", "talk"))
    await asyncio.sleep(0)
    with pytest.raises(SessionBusy, match="2 turns are under way"):
        await patient.enter("k", "talk")
    first()
    (await second)()
    end()
    (await gate.enter("k", "talk"))()
    assert gate._lines == patient._lines == {}


async def test_a_turn_that_breaks_is_not_kept(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """Neither an error of the worker nor a client that leaves adds to the session; the turn can be sent again."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk({"content": "half"}))
        await asyncio.Event().wait()
        raise AssertionError

    worker.answer = half
    gateway = await serve(sessions)
    raw = await RawClient.connect(gateway.port)
    body = json.dumps({"model": "m", "messages": user("lost"), "stream": True}).encode()
    await raw.send("/v1/chat/completions", body, "application/json\r\nX-Pagein-Session: talk")
    await raw.until(b"half")
    await raw.leave()
    await worker.deserted()
    assert await desk.settled() == [499]

    async def failing(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    worker.answer = failing
    client = talking(client_of(gateway))
    with pytest.raises(openai.InternalServerError):
        await say(client, "lost too")
    worker.answer = lambda request: stream(request, b'data: {"error": {"message": "no"}}\n\n')
    with pytest.raises(openai.APIError):
        async for _ in await client.chat.completions.create(model="m", messages=user("x"), stream=True):  # type: ignore[call-overload]
            pass
    assert await kept(sessions) == []
    worker.answer = echo
    assert await say(client, "again") == "1:again"


async def test_it_is_kept_before_the_last_byte(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """When the client has the end of a stream, the turn is in the file already."""
    worker.answer = echo
    gateway = await serve(sessions)
    body = {"model": "m", "messages": user("one"), "stream": True}
    headers = {"X-Pagein-Session": "talk"}
    async with gateway.post("/v1/chat/completions", json=body, headers=headers) as response:
        await response.content.readuntil(b"[DONE]")
        assert len(await kept(sessions)) == 2


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("../etc", {}, "must begin with a letter"),
        ("talk", {"messages": []}, "messages"),
        ("talk", {"n": 2}, "`n`"),
    ],
)
async def test_what_cannot_be_a_turn(
    worker: FakeWorker, serve: Serve, sessions: SessionStore, name: str, body: dict[str, Any], words: str
) -> None:
    """An odd name, no message, and several answers at once are refused before anything is asked."""
    gateway = await serve(sessions)
    full = {"model": "m", "messages": user("x"), **body}
    async with gateway.post("/v1/chat/completions", json=full, headers={"X-Pagein-Session": name}) as response:
        assert response.status == 400
        assert words in (await response.json())["error"]["message"]
    assert worker.requests == []


async def test_only_chats_have_sessions(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The header on another path is refused instead of ignored, and so it is where state is switched off."""
    gateway = await serve(sessions)
    headers = {"X-Pagein-Session": "talk"}
    async with gateway.post("/v1/embeddings", json={"model": "m", "input": "x"}, headers=headers) as response:
        assert response.status == 400
    off = await serve()
    body = {"model": "m", "messages": user("x")}
    async with off.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "state_off")


async def test_another_model_goes_on(desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A session goes on with another model; the header says whose history is computed anew."""
    desk.models["other"] = desk.models["m"]
    worker.answer = echo
    gateway = await serve(sessions)
    await say(talking(client_of(gateway)), "one")
    body = {"model": "other", "messages": user("two")}
    headers = {"X-Pagein-Session": "talk"}
    async with gateway.post("/v1/chat/completions", json=body, headers=headers) as response:
        assert response.headers["X-Pagein-History"] == "2; recomputed; last-model=m"
        assert (await response.json())["choices"][0]["message"]["content"] == "3:two"


async def test_list_delete_and_export(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """What is kept is listed, exported as lines of JSON and deleted, by id or by the name of a session."""
    worker.answer = echo
    gateway = await serve(sessions)
    client = client_of(gateway)
    await say(talking(client), "one")
    made = await client.conversations.create(items=[{"role": "user", "content": "hi"}])
    async with gateway.get("/api/state/conversations") as response:
        listed = (await response.json())["conversations"]
    assert [(one["kind"], one["name"], one["entries"]) for one in listed] == [
        ("conversation", None, 1),
        ("session", "talk", 2),
    ]
    async with gateway.get("/api/state/export", params={"conversation": "talk"}) as response:
        assert response.headers["Content-Type"] == "application/jsonl"
        lines = [json.loads(line) for line in (await response.text()).splitlines()]
    assert [line.get("body", {}).get("content") for line in lines] == [None, "one", "1:one"]
    async with gateway.session.delete(f"{gateway.url}/api/state/conversations/talk") as response:
        assert response.status == 204
    async with gateway.get("/api/state/export", params={"conversation": "talk"}) as response:
        assert response.status == 404
    assert len((await sessions.entries(sessions.tenant_of(None), made.id, Span())).entries) == 1
