"""Passes a worker's answer to the client as it comes, and nothing that is no answer.

- *Errors* (4xx, 5xx) pass in OpenAI's shape, whatever the worker sent as a body.
- *JSON* up to `_WHOLE` is collected first, so that a worker that dies within it, or sends something else, gives a clean
  error; a longer answer passes as it comes, its last piece only once it is seen to be the end of JSON.
- *Events* pass whole. A stream that breaks, ends without ``[DONE]`` or holds something else ends with an error event.
- *Other text* (a transcript as text or subtitles) passes unchanged.

What is held in memory is bounded in each case; a client that reads slowly slows the worker down.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator

import aiohttp
from aiohttp import web

from pagein.errors import BadAnswer
from pagein.gateway import answers, sse
from pagein.gateway.call import Call
from pagein.gateway.problems import as_event, from_worker, retry_of_worker
from pagein.gateway.reply import Reply
from pagein.gateway.upstream import WorkerBroke
from pagein.protocol import Capability

_WHOLE = 1024 * 1024
_LONGEST_ERROR = 1024 * 1024
_JSON = "application/json"
_AFTER_DONE = 0.5
"""Seconds that the worker has to end its stream after ``[DONE]``, so that its connection can be kept."""

Chunks = AsyncGenerator[bytes, None]


class Silence:
    """Measures how long nothing moves; each sign of life starts it anew."""

    def __init__(self, clock: asyncio.Timeout, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._now = asyncio.get_running_loop().time

    def broken(self) -> None:
        """Start anew."""
        self._clock.reschedule(self._now() + self._seconds)


async def relay(call: Call, upstream: aiohttp.ClientResponse, reply: Reply, silence: Silence) -> web.StreamResponse:
    """Answer the client as the worker answers; raises WorkerBroke when that ends too early, and BadAnswer."""
    silence.broken()
    chunks = _chunks(call, upstream, silence)
    if 400 <= upstream.status < 600:
        return await _relay_failure(call, upstream, reply, chunks)
    answers.check_status(call.model, upstream.status)
    content_type = upstream.headers.get("Content-Type", "application/octet-stream")
    if call.stream != content_type.startswith(sse.CONTENT_TYPE) and not _is_free(call, content_type):
        raise await _wrong_kind(call, content_type, chunks)
    if content_type.startswith(sse.CONTENT_TYPE):
        return await _relay_events(call, upstream, reply, silence, chunks)
    length = None if "Content-Encoding" in upstream.headers else upstream.content_length
    if length is not None and length > answers.LARGEST:
        raise answers.too_long(call.model)
    if _is_free(call, content_type):
        await reply.open(upstream.status, content_type, length)
        async for chunk in chunks:
            await _pass(chunk, reply, silence)
        return await reply.end()
    return await _relay_json(call, upstream, reply, silence, chunks, length)


def _is_free(call: Call, content_type: str) -> bool:
    """A transcript may be text, subtitles or events, as the form asked; every other path answers JSON or a stream."""
    return call.capability is Capability.TRANSCRIPTION and not answers.is_json_type(content_type)


async def _relay_json(
    call: Call,
    upstream: aiohttp.ClientResponse,
    reply: Reply,
    silence: Silence,
    chunks: Chunks,
    length: int | None,
) -> web.StreamResponse:
    body, complete = await _collect(chunks, _WHOLE)
    if complete:
        answers.check_json(call.model, body)
        return await reply.whole(upstream.status, _JSON, body)
    answers.check_json_start(call.model, body)
    await reply.open(upstream.status, _JSON, length)
    held = body
    async for chunk in chunks:
        await _pass(held, reply, silence)
        held = chunk
    answers.check_json_end(call.model, held)
    await _pass(held, reply, silence)
    return await reply.end()


async def _relay_events(
    call: Call, upstream: aiohttp.ClientResponse, reply: Reply, silence: Silence, chunks: Chunks
) -> web.StreamResponse:
    events = sse.WholeEvents(checked=call.stream)
    if not reply.begun:
        await reply.open(upstream.status, upstream.headers["Content-Type"])
    async for chunk in chunks:
        if whole := events.feed(chunk):
            reply.pass_on(whole)
            await _pass(whole, reply, silence)
        if events.done or events.fault is not None:
            break
    if rest := events.rest():
        reply.pass_on(rest)
        await _pass(rest, reply, silence)
    reply.told_all = events.fault is None and (events.done or events.finished)
    if events.fault is not None:
        raise BadAnswer(f"the worker of {call.model!r} sent {events.fault}", model=call.model)
    if events.done:
        await _end(chunks)
    elif call.stream and not events.finished:
        raise WorkerBroke("the stream ended without [DONE]")
    return await reply.end()


async def _relay_failure(
    call: Call, upstream: aiohttp.ClientResponse, reply: Reply, chunks: Chunks
) -> web.StreamResponse:
    body, _ = await _collect(chunks, _LONGEST_ERROR)
    passed = from_worker(call.model, upstream.status, body)
    if passed is body and not _is_object(body):
        passed = json.dumps(as_event(upstream.status, body), ensure_ascii=False).encode("utf-8", "backslashreplace")
    for name, value in retry_of_worker(passed).items():
        reply.tell(name, value)
    return await reply.pass_failure(upstream.status, _JSON, passed)


async def _wrong_kind(call: Call, content_type: str, chunks: Chunks) -> BadAnswer:
    body = b""
    with contextlib.suppress(WorkerBroke):
        body, _ = await _collect(chunks, answers.EXCERPT)
    came = answers.excerpt(content_type.encode("utf-8", "replace"))
    wanted = "events were" if call.stream else "JSON was"
    began = f": {answers.excerpt(body)}" if body.strip() else ""
    return BadAnswer(f"the worker of {call.model!r} answered {came} where {wanted} asked for{began}", model=call.model)


async def _pass(chunk: bytes, reply: Reply, silence: Silence) -> None:
    await reply.write(chunk)
    silence.broken()


async def _collect(chunks: Chunks, limit: int) -> tuple[bytes, bool]:
    """Read up to a limit, and tell whether that was all."""
    body = bytearray()
    async for chunk in chunks:
        body += chunk
        if len(body) > limit:
            return bytes(body), False
    return bytes(body), True


async def _end(chunks: Chunks) -> None:
    """Read to the end of a stream that has said its last word; whatever comes is nobody's."""
    with contextlib.suppress(TimeoutError, WorkerBroke, BadAnswer):
        async with asyncio.timeout(_AFTER_DONE):
            async for _ in chunks:
                pass


async def _chunks(call: Call, upstream: aiohttp.ClientResponse, silence: Silence) -> Chunks:
    """Yield what the worker sends; only its faults become WorkerBroke, not those of the client that is written to."""
    came = 0
    try:
        async for chunk in upstream.content.iter_any():
            silence.broken()
            came += len(chunk)
            if came > answers.LARGEST:
                raise answers.too_long(call.model)
            yield chunk
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerBroke(str(error)) from error


def _is_object(body: bytes) -> bool:
    try:
        return isinstance(answers.read_json(body), dict)
    except ValueError:
        return False
