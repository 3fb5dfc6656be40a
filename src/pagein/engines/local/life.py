"""Signs of life of a request that takes minutes: sent while something is really computed, and only then.

A worker that is silent for a request's time-out is taken for hung. Before an answer begins the sign is HTTP's interim
answer 102 (RFC 2518, 10.1), which clients skip; the gateway counts it as life. Within a stream it is a comment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import HttpVersion11, web

from pagein.protocol import QUIET, SIGNS, SILENCE_HEADER

T = TypeVar("T")
_SHORTEST = 0.1
_PROCESSING = b"HTTP/1.1 102 Processing\r\n\r\n"


class Pulse:
    """Tells for one request whether anything was computed since it was asked last."""

    def __init__(self, beats: Callable[[], int]) -> None:
        self._beats, self._seen = beats, beats()

    def beat(self) -> bool:
        """Whether the count has grown."""
        before, self._seen = self._seen, self._beats()
        return self._seen != before


def quiet(request: web.Request) -> float:
    """Seconds without a word after which a sign is due: fewer where a silence of fewer counts as a hang."""
    try:
        silence = float(request.headers.get(SILENCE_HEADER, ""))
    except ValueError:
        return QUIET
    return max(_SHORTEST, min(QUIET, silence / SIGNS))


async def show_life(request: web.Request, pulse: Pulse) -> None:
    """Send an interim answer where something was computed; the answer must not have begun."""
    if not pulse.beat() or request.version < HttpVersion11:
        return
    await request.writer.write(_PROCESSING)
    request.writer.output_size = 0  # as aiohttp itself does after its answer to `Expect`


async def alive(request: web.Request, pulse: Pulse, work: Awaitable[T]) -> T:
    """Wait for work and show life meanwhile; the work is called off with the wait."""
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait([task], timeout=quiet(request)))[0]:
            await show_life(request, pulse)
        return task.result()
    finally:
        task.cancel()
