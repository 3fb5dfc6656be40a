"""Workers that answer a chat by what they were told, and clients for them."""

from __future__ import annotations

import json
from typing import Any

import openai
from aiohttp import web

from tests.gateway.conftest import Served
from tests.gateway.fakes import FakeWorker, stream

USAGE = {
    "prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 5},
}  # fmt: skip


def client_of(gateway: Served, key: str = "none") -> openai.AsyncOpenAI:
    """Return a client that does not try again by itself; nothing here is TLS, whose certificates take long to read."""
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0, http_client=plain)


def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
    """Return one event of a streamed chat."""
    value = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
             "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}  # fmt: skip
    return f"data: {json.dumps(value)}\n\n".encode()


USAGE_CHUNK = f"data: {json.dumps({'choices': [], 'usage': USAGE})}\n\n".encode()
DONE = b"data: [DONE]\n\n"


def whole(message: dict[str, Any], finish: str = "stop") -> web.Response:
    """Return a whole chat."""
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return web.json_response({"id": "c", "object": "chat.completion", "created": 1, "model": "m",
                              "choices": [choice], "usage": USAGE})  # fmt: skip


async def echo(request: web.Request) -> web.StreamResponse:
    """Answer with the number of messages and the last one's text, in two pieces where it is streamed."""
    body = json.loads(await request.text())
    last = body["messages"][-1]["content"]
    text = f"{len(body['messages'])}:{last}"
    if not body.get("stream"):
        return whole({"content": text})
    pieces = [chunk({"role": "assistant", "content": text[:2]}), chunk({"content": text[2:]}), chunk({}, "stop")]
    return await stream(request, *pieces, USAGE_CHUNK, DONE)


def asked(worker: FakeWorker, which: int = -1) -> dict[str, Any]:
    """Return the body of a chat that the worker got."""
    body = json.loads(worker.requests[which][1])
    assert isinstance(body, dict)
    return body


def messages(worker: FakeWorker, which: int = -1) -> list[tuple[str, Any]]:
    """Return role and content of the messages that the worker got."""
    return [(message["role"], message["content"]) for message in asked(worker, which)["messages"]]
