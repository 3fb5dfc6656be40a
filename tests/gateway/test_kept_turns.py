"""Whose turn a request is reaches the desk, so that what is saved of it can go with its conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import openai
import pytest
from aiohttp import web

from pagein.history import Gone
from pagein.sessions.store import SessionStore
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import FakeDesk, FakeWorker, RawClient, begin, eventually, request_for
from tests.gateway.talkers import chunk, client_of, echo

USER = [{"role": "user", "content": "one"}]


class Told:
    """What the store of conversations tells."""

    def __init__(self, sessions: SessionStore) -> None:
        self.gone: list[tuple[str, bool]] = []
        sessions.on_gone = self._add

    def _add(self, gone: Sequence[Gone], wanted: bool) -> asyncio.Future[None]:
        self.gone += [(one.conversation, wanted) for one in gone]
        done = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done


@pytest.fixture
def told(sessions: SessionStore) -> Told:
    return Told(sessions)


async def chat(gateway: Served, session: str | None = "talk", stream: bool = False) -> str:
    """Say one thing in a session, and return its conversation."""
    headers = {"X-Pagein-Session": session} if session is not None else {}
    body = {"model": "m", "messages": USER, "stream": stream}
    async with gateway.post("/v1/chat/completions", json=body, headers=headers) as response:
        await response.read()
        return str(response.headers.get("X-Pagein-Conversation"))


@pytest.mark.parametrize("stream", [False, True])
async def test_each_turn_of_a_session_is_its_own(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore, told: Told, stream: bool
) -> None:
    """The desk is told the conversation's id, from the first turn on, and since when; another chat is nobody's."""
    worker.answer = echo
    gateway = await serve(sessions)
    before = time.monotonic()
    named = {await chat(gateway, stream=stream) for _ in range(2)}
    await chat(gateway, None)
    first, second, other = desk.turns
    assert first is not None
    assert second is not None
    assert other is None
    assert {first.conversation, second.conversation} == named
    assert before < first.since < second.since < time.monotonic()
    assert told.gone == []
    assert {one.conversation for one in await sessions.known()} == named


async def test_each_response_is_its_chains_or_its_conversations(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """Also one that is not kept itself, where it continues what is; alone it is nobody's."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    first = await client.responses.create(model="m", input="one")
    await client.responses.create(model="m", input="two", previous_response_id=first.id)
    await client.responses.create(model="m", input="three", previous_response_id=first.id, store=False)
    made = await client.conversations.create()
    await client.responses.create(model="m", input="four", conversation=made.id)
    await client.responses.create(model="m", input="five", store=False)
    ids = [turn.conversation if turn is not None else None for turn in desk.turns]
    assert len(set(ids[:3])) == 1
    assert str(ids[0]).startswith("chain_")
    assert ids[3:] == [made.id, None]


async def test_a_first_turn_that_breaks_is_told(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore, told: Told
) -> None:
    """The conversation that would have begun does not; a later turn that breaks leaves its conversation as it is."""

    async def failing(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    worker.answer = failing
    gateway = await serve(sessions)
    await chat(gateway)
    with pytest.raises(openai.InternalServerError):
        await client_of(gateway).responses.create(model="m", input="one")
    assert told.gone == [(turn.conversation, False) for turn in desk.turns if turn is not None]
    assert len(told.gone) == 2
    worker.answer = echo
    await chat(gateway)
    worker.answer = failing
    await chat(gateway)
    assert len(told.gone) == 2


async def test_a_client_that_leaves_its_first_turn_is_told(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore, told: Told
) -> None:
    """After the lease was given back, so that nothing of it is under way any more."""
    worker.answer = FakeWorker.silent
    gateway = await serve(sessions)
    client = await RawClient.connect(gateway.port)
    await client.send("/v1/responses", b'{"model": "m", "input": "one"}')
    await worker.busy()
    await client.leave()
    await desk.settled()
    await eventually(lambda: bool(told.gone))
    assert told.gone == [(turn.conversation, False) for turn in desk.turns if turn is not None]


PING = b": ping\n\n"
PROGRESS = b'data: {"choices": [], "prompt_progress": {"processed": 512, "total": 4096}}\n\n'


@pytest.mark.parametrize(("came", "computed"), [(PING, False), (PROGRESS, False), (chunk({"content": "hi"}), True)])
async def test_whether_the_prompt_was_computed_is_told(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, came: bytes, computed: bool
) -> None:
    """The first event of an answer proves it; what an engine sends amid the prompt does not."""

    async def answer(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(came)
        return await FakeWorker.silent(request)

    worker.answer = answer
    client = await RawClient.connect((await serve()).port)
    await client.send("/v1/chat/completions", request_for("/v1/chat/completions", stream=True)[0])
    await client.until(came)
    await client.leave()
    await desk.settled()
    assert desk.computed == [computed]


async def test_a_whole_answer_was_computed(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Also where it has no counters; an error was not."""
    gateway = await serve()
    await chat(gateway, None)

    async def failing(request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no"}}, status=500)

    worker.answer = failing
    await chat(gateway, None)
    assert desk.computed == [True, False]
