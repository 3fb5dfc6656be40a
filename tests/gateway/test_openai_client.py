"""The official `openai` client works unchanged."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
from aiohttp import web

from pagein.errors import QueueFull
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import FakeDesk, FakeWorker, begin, stream

USER = [{"role": "user", "content": "hi"}]


def client_of(gateway: Served, key: str = "none") -> openai.AsyncOpenAI:
    """Return a client for a gateway that does not try again by itself."""
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0)


def completion(request: web.Request) -> dict[str, object]:
    """Return the answer of a chat as OpenAI defines it."""
    message = {"role": "assistant", "content": "hello"}
    return {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    }  # fmt: skip


def chunks() -> list[bytes]:
    """Return a streamed chat with usage."""
    base = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    parts: list[dict[str, object]] = [
        {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": None}]} for text in ("hel", "lo")
    ]
    parts.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}})
    return [f"data: {json.dumps({**base, **part})}\n\n".encode() for part in parts] + [b"data: [DONE]\n\n"]


async def test_chat(worker: FakeWorker, serve: Serve) -> None:
    """A chat, with the key of the daemon."""

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(completion(request))

    worker.answer = answer
    client = client_of(await serve(api_key="a-secret-key"), "a-secret-key")
    got = await client.chat.completions.create(model="m", messages=USER)  # type: ignore[arg-type]
    assert got.choices[0].message.content == "hello"
    assert got.usage is not None
    assert got.usage.total_tokens == 3
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong-key-here").models.list()


@pytest.mark.parametrize("heartbeat", [0.001, 3600])
async def test_streamed_chat(desk: FakeDesk, worker: FakeWorker, serve: Serve, heartbeat: float) -> None:
    """A streamed chat with usage, with and without heartbeats before it."""
    if heartbeat < 1:
        desk.gate.clear()
        asyncio.get_running_loop().call_later(20 * heartbeat, desk.gate.set)
    worker.answer = lambda request: stream(request, *chunks())
    client = client_of(await serve(heartbeat=heartbeat))
    got = await client.chat.completions.create(
        model="m",
        messages=USER,
        stream=True,
        stream_options={"include_usage": True},  # type: ignore[arg-type]
    )
    text, usage = "", None
    async for chunk in got:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == "hello"
    assert usage is not None
    assert usage.total_tokens == 3
    assert await desk.settled() == [200]


async def test_completion_embeddings_and_transcription(worker: FakeWorker, serve: Serve) -> None:
    """The other endpoints of the client, a file upload among them."""

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/v1/embeddings":
            data = [{"object": "embedding", "index": 0, "embedding": [0.5, -1.0]}]
            return web.json_response(
                {"object": "list", "model": "m", "data": data, "usage": {"prompt_tokens": 1, "total_tokens": 1}}
            )
        if request.path == "/v1/audio/transcriptions":
            return web.json_response({"text": "well said"})
        choice = {"index": 0, "text": "on", "finish_reason": "stop", "logprobs": None}
        return web.json_response(
            {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": [choice]}
        )

    worker.answer = answer
    client = client_of(await serve())
    assert (await client.completions.create(model="m", prompt="go")).choices[0].text == "on"
    vectors = await client.embeddings.create(model="m", input="x", encoding_format="float")
    assert vectors.data[0].embedding == [0.5, -1.0]
    sound = b"RIFF" + bytes(100_000)
    assert (await client.audio.transcriptions.create(model="m", file=("a.wav", sound))).text == "well said"
    assert sound in worker.requests[-1][1]


async def test_models(serve: Serve) -> None:
    """The list of models and one of them."""
    client = client_of(await serve())
    assert [model.id async for model in client.models.list()] == ["m"]
    assert (await client.models.retrieve("m")).owned_by == "pagein"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("x")


async def test_errors_are_the_clients_own(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Refusals arrive as the client's exceptions, with code and message."""
    client = client_of(await serve())
    with pytest.raises(openai.NotFoundError) as missing:
        await client.embeddings.create(model="x", input="x")
    assert missing.value.code == "model_not_found"
    desk.refusal = QueueFull("m", 9, 9)
    with pytest.raises(openai.RateLimitError, match="9 waiting, the limit is 9") as full:
        await client.embeddings.create(model="m", input="x")
    assert full.value.code == "queue_full"


async def test_a_death_within_a_stream_raises(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """The client of a stream that breaks gets an exception with the reason, not a short answer."""
    heard = asyncio.Event()

    async def die_later(request: web.Request) -> web.StreamResponse:
        response = await begin(request)
        await response.write(chunks()[0])
        await heard.wait()
        assert request.transport is not None
        request.transport.close()
        return response

    worker.answer = die_later
    client = client_of(await serve())
    got = await client.chat.completions.create(model="m", messages=USER, stream=True)  # type: ignore[arg-type]
    assert (await anext(got)).choices
    heard.set()
    with pytest.raises(openai.APIError, match="out of memory"):
        await anext(got)
    assert await desk.settled() == [502]
