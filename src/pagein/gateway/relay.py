"""Passes a worker's answer to the client, byte by byte as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
from aiohttp import web

from pagein.errors import BadAnswer
from pagein.gateway import sse
from pagein.gateway.call import Call
from pagein.gateway.problems import from_worker
from pagein.gateway.reply import Reply
from pagein.gateway.upstream import WorkerBroke

_WHOLE = 1024 * 1024
"""An answer of known length up to this is collected first, so that a worker that dies within it gives a clean error."""
_LONGEST_ERROR = 1024 * 1024


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
    """Answer the client as the worker answers; raises WorkerBroke when that ends too early."""
    silence.broken()
    content_type = upstream.headers.get("Content-Type", "application/octet-stream")
    if upstream.status >= 400:
        return await _relay_failure(call, upstream, reply, silence, content_type)
    if content_type.startswith(sse.CONTENT_TYPE):
        return await _relay_events(call, upstream, reply, silence, content_type)
    if reply.begun:
        raise BadAnswer(f"the worker of {call.model!r} answered {content_type} where events were asked for")
    length = None if "Content-Encoding" in upstream.headers else upstream.content_length
    if length is not None and length <= _WHOLE:
        return await reply.whole(upstream.status, content_type, await _collect(upstream, silence, _WHOLE))
    await reply.open(upstream.status, content_type, length)
    async for chunk in _chunks(upstream, silence):
        await reply.write(chunk)
        silence.broken()
    return await reply.end()


async def _relay_events(
    call: Call, upstream: aiohttp.ClientResponse, reply: Reply, silence: Silence, content_type: str
) -> web.StreamResponse:
    events = sse.WholeEvents()
    if not reply.begun:
        await reply.open(upstream.status, content_type)
    async for chunk in _chunks(upstream, silence):
        if whole := events.feed(chunk):
            await reply.write(whole)
            silence.broken()
    if rest := events.rest():
        await reply.write(rest)
    if call.stream and not events.finished:
        raise WorkerBroke("the stream ended without [DONE]")
    return await reply.end()


async def _relay_failure(
    call: Call, upstream: aiohttp.ClientResponse, reply: Reply, silence: Silence, content_type: str
) -> web.StreamResponse:
    body = await _collect(upstream, silence, _LONGEST_ERROR)
    passed = from_worker(call.model, upstream.status, body)
    if passed is not body:
        content_type = "application/json"
    return await reply.pass_failure(upstream.status, content_type, passed)


async def _collect(upstream: aiohttp.ClientResponse, silence: Silence, limit: int) -> bytes:
    body = bytearray()
    async for chunk in _chunks(upstream, silence):
        body += chunk
        if len(body) >= limit:
            break
    return bytes(body)


async def _chunks(upstream: aiohttp.ClientResponse, silence: Silence) -> AsyncIterator[bytes]:
    """Yield what the worker sends; only its faults become WorkerBroke, not those of the client that is written to."""
    try:
        async for chunk in upstream.content.iter_any():
            silence.broken()
            yield chunk
    except (aiohttp.ClientError, OSError) as error:
        raise WorkerBroke(str(error)) from error
