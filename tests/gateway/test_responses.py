"""`/v1/responses` and `/v1/conversations` by the official client, whose own types must read every answer."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from aiohttp import web
from openai.types.conversations import Conversation, ConversationItem
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from pagein.errors import WorkerDied
from pagein.sessions.store import SessionStore
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker, RawClient, begin, stream
from tests.gateway.talkers import DONE, USAGE_CHUNK, asked, chunk, client_of, echo, messages, whole

STRICT_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
STRICT_ITEM: TypeAdapter[Any] = TypeAdapter(ConversationItem)
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object", "properties": {}}, "strict": True}
CALL = [
    chunk({"role": "assistant", "content": None}),
    chunk({"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": {"name": "weather"}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": '{"city"'}}]}),
    chunk({"tool_calls": [{"index": 0, "function": {"arguments": ': "Bonn"}'}}]}),
    chunk({}, "tool_calls"),
    USAGE_CHUNK,
    DONE,
]


async def events_of(gateway: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Stream a response and return its events; the names of the frames and the order of the numbers are checked."""
    async with gateway.post("/v1/responses", json={"model": "m", "stream": True, **body}) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        text = await response.text()
    events = []
    for frame in text.split("\n\n"):
        if frame and not frame.startswith(":"):
            name, data = frame.split("\n")
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_chain(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The second response is told the first one's question and answer; instructions are not carried over."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    first = await client.responses.create(model="m", input="one", instructions="Be brief", metadata={"a": "b"})
    assert first.output_text == "2:one"
    assert (first.status, first.metadata, first.usage.total_tokens) == ("completed", {"a": "b"}, 9)
    assert first.usage.input_tokens_details.cached_tokens == 5
    second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
    assert messages(worker) == [("user", "one"), ("assistant", "2:one"), ("user", "two")]
    assert second.previous_response_id == first.id
    assert (await client.responses.retrieve(second.id)) == second
    items = await client.responses.input_items.list(second.id)
    assert [item.content[0].text for item in items.data] == ["two"]
    await client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(second.id)


async def test_the_answer_is_of_openais_type(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The whole response, and each event of a stream, pass the strict validation of the client's own models."""
    worker.answer = echo
    gateway = await serve(sessions)
    async with gateway.post("/v1/responses", json={"model": "m", "input": "x", "tools": [TOOL]}) as response:
        Response.model_validate(await response.json(), strict=True)
    for event in await events_of(gateway, {"input": "x"}):
        STRICT_EVENT.validate_python(event)


async def test_the_order_of_events(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A streamed text has OpenAI's events in OpenAI's order, and its last one is the response as it is stored."""
    worker.answer = echo
    gateway = await serve(sessions)
    events = await events_of(gateway, {"input": "hello"})
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert "".join(event["delta"] for event in events if event["type"].endswith("delta")) == "1:hello"
    assert asked(worker)["stream_options"] == {"include_usage": True}
    last = events[-1]["response"]
    assert last["output"] == [events[-2]["item"]]
    async with gateway.get(f"/v1/responses/{last['id']}") as response:
        assert await response.json() == last


async def test_the_client_streams(desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """The client's own helper puts the streamed response together, with heartbeats before it."""
    desk.gate.clear()
    asyncio.get_running_loop().call_later(0.02, desk.gate.set)
    worker.answer = echo
    client = client_of(await serve(sessions, heartbeat=0.001))
    async with client.responses.stream(model="m", input="hello") as got:
        kinds = [event.type async for event in got]
        final = await got.get_final_response()
    assert kinds[0] == "response.created"
    assert final.output_text == "1:hello"


async def test_a_tool_is_called_and_answered(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A call of a function comes as an item with its events; its output goes on in the next turn."""
    worker.answer = lambda request: stream(request, *CALL)
    gateway = await serve(sessions)
    events = await events_of(gateway, {"input": "weather?", "tools": [TOOL], "tool_choice": "required"})
    for event in events:
        STRICT_EVENT.validate_python(event)
    assert [event["type"].removeprefix("response.") for event in events] == [
        "created", "in_progress", "output_item.added", "function_call_arguments.delta",
        "function_call_arguments.delta", "function_call_arguments.done", "output_item.done", "completed",
    ]  # fmt: skip
    chat = asked(worker)
    assert chat["tools"][0]["function"]["name"] == "weather"
    assert chat["tool_choice"] == "required"
    call = events[-1]["response"]["output"][0]
    assert (call["call_id"], call["arguments"]) == ("call_1", '{"city": "Bonn"}')
    worker.answer = echo
    client = client_of(gateway)
    answer = await client.responses.create(
        model="m",
        previous_response_id=events[-1]["response"]["id"],
        input=[{"type": "function_call_output", "call_id": "call_1", "output": "rain"}],
    )
    assert answer.output_text == "3:rain"
    sent = asked(worker)["messages"]
    assert sent[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bonn"}'}
    assert sent[2] == {"role": "tool", "tool_call_id": "call_1", "content": "rain"}


async def test_reasoning_is_an_item_of_its_own(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """What a model thinks comes before its message, is kept, and is not sent to it again."""
    pieces = [chunk({"reasoning_content": "hm"}), chunk({"content": "yes"}), chunk({}, "stop"), USAGE_CHUNK, DONE]
    worker.answer = lambda request: stream(request, *pieces)
    gateway = await serve(sessions)
    events = await events_of(gateway, {"input": "?"})
    for event in events:
        STRICT_EVENT.validate_python(event)
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]
    worker.answer = echo
    await client_of(gateway).responses.create(model="m", input="so", previous_response_id=events[-1]["response"]["id"])
    assert messages(worker) == [("user", "?"), ("assistant", "yes"), ("user", "so")]


async def test_a_cut_answer_is_incomplete(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """An answer that reached its longest length says so, in a stream and whole, and can be continued."""
    worker.answer = lambda request: stream(request, chunk({"content": "a"}), chunk({}, "length"), DONE)
    gateway = await serve(sessions)
    last = (await events_of(gateway, {"input": "x", "max_output_tokens": 1}))[-1]
    assert last["type"] == "response.incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert asked(worker)["max_tokens"] == 1

    async def cut(request: web.Request) -> web.Response:
        return whole({"content": "a"}, "length")

    worker.answer = cut
    got = await client_of(gateway).responses.create(model="m", input="y", previous_response_id=last["response"]["id"])
    assert got.status == "incomplete"


async def test_two_branches(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """Two responses that continue one at the same time are two branches, and both are kept."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    root = await client.responses.create(model="m", input="root")
    left, right = await asyncio.gather(
        *(client.responses.create(model="m", input=word, previous_response_id=root.id) for word in ("left", "right"))
    )
    await client.responses.create(model="m", input="on", previous_response_id=left.id)
    assert [text for _, text in messages(worker)] == ["root", "1:root", "left", "3:left", "on"]
    await client.responses.create(model="m", input="on", previous_response_id=right.id)
    assert [text for _, text in messages(worker)] == ["root", "1:root", "right", "3:right", "on"]


async def test_a_conversation(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A conversation is made, filled, answered in, listed, changed and deleted by the official client."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    made = await client.conversations.create(
        items=[{"type": "message", "role": "developer", "content": "Be brief"}], metadata={"topic": "demo"}
    )
    Conversation.model_validate(made.model_dump(), strict=True)
    got = await client.responses.create(model="m", input="hi", conversation=made.id)
    assert got.conversation is not None
    assert got.conversation.id == made.id
    assert messages(worker) == [("system", "Be brief"), ("user", "hi")]
    await client.responses.create(model="m", input="more", conversation=made.id)
    assert [role for role, _ in messages(worker)] == ["system", "user", "assistant", "user"]
    listed = [item async for item in client.conversations.items.list(made.id, order="asc", limit=2)]
    assert [item.role for item in listed] == ["developer", "user", "assistant", "user", "assistant"]
    for item in listed:
        STRICT_ITEM.validate_python(item.model_dump(exclude_unset=True))
    added = await client.conversations.items.create(made.id, items=[{"role": "user", "content": "by hand"}])
    one = await client.conversations.items.retrieve(added.data[0].id, conversation_id=made.id)
    assert one.content[0].text == "by hand"
    await client.conversations.items.delete(one.id, conversation_id=made.id)
    with pytest.raises(openai.NotFoundError):
        await client.conversations.items.retrieve(one.id, conversation_id=made.id)
    assert (await client.conversations.update(made.id, metadata={"topic": "new"})).metadata == {"topic": "new"}
    assert (await client.conversations.retrieve(made.id)).metadata == {"topic": "new"}
    assert (await client.conversations.delete(made.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="m", input="hi", conversation=made.id)


async def test_turns_of_a_conversation_go_one_after_the_other(
    worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """The second of two turns at once sees the first one's answer."""
    first, go = asyncio.Event(), asyncio.Event()

    async def slow(request: web.Request) -> web.StreamResponse:
        if not first.is_set():
            first.set()
            await go.wait()
        return await echo(request)

    worker.answer = slow
    client = client_of(await serve(sessions))
    made = await client.conversations.create()
    one = asyncio.create_task(client.responses.create(model="m", input="one", conversation=made.id))
    await first.wait()
    two = asyncio.create_task(client.responses.create(model="m", input="two", conversation=made.id))
    await client.conversations.retrieve(made.id)  # the gateway has had its time to send the second one
    assert len(worker.requests) == 1
    go.set()
    assert [(await one).output_text, (await two).output_text] == ["1:one", "3:two"]


async def test_another_model_is_told_everything(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """With another model the history goes whole, and a header says that it is computed anew."""
    desk.models["other"] = desk.models["m"]
    worker.answer = echo
    gateway = await serve(sessions)
    first = await client_of(gateway).responses.create(model="m", input="one")
    body = {"model": "other", "input": "two", "previous_response_id": first.id}
    async with gateway.post("/v1/responses", json=body) as response:
        assert response.headers["X-Pagein-History"] == "2; recomputed; last-model=m"
    assert len(messages(worker)) == 3


async def test_what_is_not_stored_is_not_there(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """`store: false` answers and keeps nothing; in a continued chain it sees the past and adds nothing."""
    worker.answer = echo
    client = client_of(await serve(sessions))
    got = await client.responses.create(model="m", input="x", store=False)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(got.id)
    kept = await client.responses.create(model="m", input="x")
    assert (await client.responses.create(model="m", input="y", previous_response_id=kept.id, store=False)).output_text
    assert [thread.entries for thread in await sessions.threads(sessions.tenant_of(None), 9)] == [2]


async def test_switched_off(worker: FakeWorker, serve: Serve) -> None:
    """Without a store a response is answered and not kept; what needs a stored one is refused by name."""
    worker.answer = echo
    client = client_of(await serve())
    assert (await client.responses.create(model="m", input="x")).output_text == "1:x"
    for wish in ({"store": True}, {"previous_response_id": "resp_1"}, {"conversation": "conv_1"}):
        with pytest.raises(openai.BadRequestError, match=next(iter(wish))):
            await client.responses.create(model="m", input="x", **wish)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="switched off"):
        await client.conversations.create()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"background": True}, "background"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"temprature": 1}, "temprature"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tool_choice": {"type": "function", "name": "none"}}, "tool_choice"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0]"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
    ],
)
async def test_what_is_not_served_is_refused_by_name(
    worker: FakeWorker, serve: Serve, sessions: SessionStore, body: dict[str, Any], param: str
) -> None:
    """A field, tool, item or part that is not served gives 400 and its name, before anything is asked of a model."""
    gateway = await serve(sessions)
    async with gateway.post("/v1/responses", json={"model": "m", "input": "x", **body}) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, param)
    assert worker.requests == []


async def test_settings_become_those_of_a_chat(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """Sampling, format, effort and pictures reach the worker in the words of a chat; Pagein's own wishes do not."""
    worker.answer = echo
    gateway = await serve(sessions)
    schema = {"type": "json_schema", "name": "s", "schema": {"type": "object"}, "strict": True}
    picture = [{"type": "input_text", "text": "what"}, {"type": "input_image", "image_url": "data:x", "detail": "low"}]
    body = {
        "model": "m", "input": [{"role": "user", "content": picture}], "temperature": 0.5, "top_p": 0.9,
        "text": {"format": schema}, "reasoning": {"effort": "low"}, "keep_alive": 5, "user": "u",
    }  # fmt: skip
    async with gateway.post("/v1/responses", json=body) as response:
        assert response.status == 200
    chat = asked(worker)
    assert chat["response_format"]["json_schema"] == {"name": "s", "schema": {"type": "object"}, "strict": True}
    assert (chat["temperature"], chat["top_p"], chat["reasoning_effort"]) == (0.5, 0.9, "low")
    assert chat["messages"][0]["content"][1] == {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    assert not {"keep_alive", "user", "input", "tools"} & chat.keys()


async def test_a_broken_stream_fails_and_keeps_nothing(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """A worker that dies amid its answer ends the stream with `response.failed`, and the turn is not kept."""
    seen = asyncio.Event()

    async def dying(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk({"content": "half"}))
        await seen.wait()
        assert request.transport is not None
        request.transport.close()
        raise asyncio.CancelledError

    worker.answer = dying
    desk.why = WorkerDied("the worker of 'm' ended: signal 9")
    gateway = await serve(sessions)
    async with gateway.post("/v1/responses", json={"model": "m", "input": "x", "stream": True}) as response:
        await response.content.readuntil(b"half")
        seen.set()
        frames = (await response.text()).split("\n\n")
    last = json.loads(frames[-2].partition("data: ")[2])
    STRICT_EVENT.validate_python(last)
    assert last["type"] == "response.failed"
    assert "signal 9" in last["response"]["error"]["message"]
    assert await sessions.threads(sessions.tenant_of(None), 9) == []
    assert await desk.settled() == [502]


async def test_an_error_of_the_worker_amid_its_events(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """An error event of the engine becomes `response.failed`, once, and the turn is not kept."""
    error = b'data: {"error": {"message": "out of slots", "code": 500}}\n\n'
    worker.answer = lambda request: stream(request, chunk({"content": "half"}), error)
    gateway = await serve(sessions)
    events = await events_of(gateway, {"input": "x"})
    assert [event["type"] for event in events if "failed" in event["type"]] == ["response.failed"]
    assert await sessions.threads(sessions.tenant_of(None), 9) == []


async def test_a_refusal_after_heartbeats_is_an_error_event(
    desk: FakeDesk, serve: Serve, sessions: SessionStore
) -> None:
    """What is refused after the first heartbeat is one event of type error; before it, it has its HTTP status."""
    desk.refusal = WorkerDied("gone")
    gateway = await serve(sessions, heartbeat=0.001)
    async with gateway.post("/v1/responses", json={"model": "m", "input": "x", "stream": True}) as response:
        assert response.status == 502
    desk.gate.clear()
    asyncio.get_running_loop().call_later(0.02, desk.gate.set)
    (event,) = await events_of(gateway, {"input": "x"})
    STRICT_EVENT.validate_python(event)
    assert (event["type"], event["code"], event["message"]) == ("error", "worker_died", "gone")


async def test_a_client_that_leaves_keeps_nothing(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, sessions: SessionStore
) -> None:
    """A turn whose client left before its end is not kept, and the next turn of the conversation does not wait."""

    async def half(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunk({"content": "half"}))
        await asyncio.Event().wait()
        raise AssertionError

    worker.answer = half
    gateway = await serve(sessions)
    client = client_of(gateway)
    made = await client.conversations.create()
    raw = await RawClient.connect(gateway.port)
    body = {"model": "m", "input": "lost", "stream": True, "conversation": made.id}
    await raw.send("/v1/responses", json.dumps(body).encode())
    await raw.until(b"half")
    await raw.leave()
    await worker.deserted()
    assert await desk.settled() == [499]
    worker.answer = echo
    assert (await client.responses.create(model="m", input="next", conversation=made.id)).output_text == "1:next"


async def test_a_turn_that_cannot_be_stored_is_not_answered(
    worker: FakeWorker, serve: Serve, sessions: SessionStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the conversation is deleted during a turn, the client is told so instead of "completed"."""
    gateway = await serve(sessions)
    client = client_of(gateway)
    made = await client.conversations.create()

    async def deleting(request: web.Request) -> web.StreamResponse:
        await client.conversations.delete(made.id)
        return await echo(request)

    worker.answer = deleting
    events = await events_of(gateway, {"input": "x", "conversation": made.id})
    assert events[-1]["type"] == "response.failed"
    made = await client.conversations.create()
    with pytest.raises(openai.NotFoundError):
        await client.responses.create(model="m", input="x", conversation=made.id)


async def test_keys_keep_tenants_apart(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A daemon with another key does not see what was said under the first; with the first key it is there again."""
    worker.answer = echo
    mine = client_of(await serve(sessions, api_key="key-number-one"), "key-number-one")
    other = client_of(await serve(sessions, api_key="key-number-two"), "key-number-two")
    got = await mine.responses.create(model="m", input="secret")
    with pytest.raises(openai.NotFoundError):
        await other.responses.retrieve(got.id)
    with pytest.raises(openai.NotFoundError):
        await other.responses.create(model="m", input="x", previous_response_id=got.id)
    assert (await mine.responses.retrieve(got.id)).id == got.id


async def test_a_key_that_nobody_checks_is_no_tenant(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """Without a configured key a client cannot choose whom it is by what it sends."""
    worker.answer = echo
    gateway = await serve(sessions)
    got = await client_of(gateway, "one").responses.create(model="m", input="x")
    assert (await client_of(gateway, "two").responses.retrieve(got.id)).id == got.id


@pytest.mark.parametrize("length", [1500, 2 * 1024**2])
async def test_long_answers(worker: FakeWorker, serve: Serve, sessions: SessionStore, length: int) -> None:
    """An answer longer than what is collected at once is put together all the same."""

    async def long(request: web.Request) -> web.Response:
        return whole({"content": "x" * length})

    worker.answer = long
    got = await client_of(await serve(sessions)).responses.create(model="m", input="x")
    assert len(got.output_text) == length


async def test_a_chat_without_a_message_is_no_answer(worker: FakeWorker, serve: Serve, sessions: SessionStore) -> None:
    """A worker that answers JSON of another shape gives 502."""
    with pytest.raises(openai.InternalServerError, match="without a message"):
        await client_of(await serve(sessions)).responses.create(model="m", input="x")
