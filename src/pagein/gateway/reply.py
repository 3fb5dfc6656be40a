"""The client's side of one call: nothing sent yet, then one whole answer or a stream."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from aiohttp import web

from pagein.errors import PageinError
from pagein.gateway import sse
from pagein.gateway.ports import Lease, Prepared
from pagein.gateway.problems import as_event, internal_problem, problem, response_of
from pagein.kv.snapshots.reuse import Counted, CountedInStream, counted

CLIENT_LEFT = 499
"""The status, never sent, of a request whose client went away; nginx's word for it."""


class Reply:
    """Writes one answer. Every method raises ConnectionError when the client has left."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._headers: dict[str, str] = {}
        self._stream: web.StreamResponse | None = None
        self._events = False
        self.writing = False
        """The client is being waited for, not the worker."""
        self._restored = 0
        self._counter = CountedInStream()
        self.counted: Counted | None = None
        """What the engine said that it reused and computed, once that has passed."""
        self.answered = False
        """The worker's answer began: it has computed the whole prompt."""
        self.told_all = False
        """The mark of the stream's end went out: many clients close there, and have their answer."""

    @property
    def begun(self) -> bool:
        """Whether headers were sent, so that the status is settled."""
        return self._stream is not None

    async def leased(self, lease: Lease, prepared: Prepared | None = None) -> None:
        """Tell the client what its request waited for and what was brought back for it.

        By headers, or by a comment in a stream that has begun.
        """
        told = {"X-Pagein-Model": lease.model, "X-Pagein-Queue-Ms": str(round(lease.waited_seconds * 1000))}
        if lease.load_seconds is not None:
            told["X-Pagein-Load-Ms"] = str(round(lease.load_seconds * 1000))
        if lease.evicted:
            told["X-Pagein-Evicted"] = ", ".join(lease.evicted)
        if prepared is not None:
            self._restored = prepared.restored
            told |= _told_of_state(prepared)
        self._headers.update(told)
        if self.begun:
            await self._send(sse.comment(", ".join(f"{name}: {value}" for name, value in self._headers.items())))

    def tell(self, name: str, value: str) -> None:
        """Add a header to the answer; to be called before `leased`, which tells it in a stream that has begun."""
        self._headers[name] = value

    async def whole(self, status: int, content_type: str, body: bytes) -> web.StreamResponse:
        """Send a complete answer."""
        self._count(body)
        self.answered = status < 400
        headers = {**self._headers, "Content-Type": content_type}
        if self.counted is not None:
            headers["X-Pagein-Computed-Tokens"] = str(self.counted.computed)
            headers |= _told_by_worker(self.counted)
            if self._restored and not self.counted.proves(self._restored):  # the engine's word counts, not ours
                headers["X-Pagein-Restored-Tokens"] = str(self.counted.cached)
                if not self.counted.cached:
                    headers["X-Pagein-Restore-Miss"] = "unused: the engine computed what was restored"
        response = web.Response(status=status, body=body, headers=headers)
        self._stream = response
        self.writing = True
        await response.prepare(self._request)
        await response.write_eof()
        self.writing = False
        return response

    def _count(self, body: bytes) -> None:
        if b'"timings"' in body or b'"cached_tokens"' in body:
            with contextlib.suppress(ValueError, RecursionError):
                answer = json.loads(body)
                self.counted = counted(answer) if isinstance(answer, dict) else None

    def pass_on(self, events: bytes) -> None:
        """Look at events of the worker that are about to be written."""
        self._counter.feed(events)
        self.counted = self._counter.value
        # amid the prompt llama.cpp sends comments, to keep the connection alive, and, where asked for, its progress
        self.answered |= b"data:" in events and b'"prompt_progress"' not in events

    async def open(self, status: int, content_type: str, length: int | None = None) -> None:
        """Send the headers of a stream."""
        self._events = content_type.startswith(sse.CONTENT_TYPE)
        headers = {**self._headers, "Content-Type": content_type, **(sse.HEADERS if self._events else {})}
        self._stream = stream = web.StreamResponse(status=status, headers=headers)
        stream.content_length = length
        await stream.prepare(self._request)

    async def write(self, chunk: bytes) -> None:
        """Send bytes of the worker's stream; waits while the client reads too slowly."""
        await self._send(chunk)

    async def _send(self, chunk: bytes) -> None:
        assert self._stream is not None
        self.writing = True
        await self._stream.write(chunk)
        self.writing = False

    async def end(self) -> web.StreamResponse:
        """End the stream regularly."""
        assert self._stream is not None
        self.writing = True
        await self._stream.write_eof()
        self.writing = False
        return self._stream

    async def comment(self, text: str) -> None:
        """Send a heartbeat, and the headers of an event stream before the first one."""
        if not self.begun:
            await self.open(200, sse.CONTENT_TYPE)
        await self._send(sse.comment(text))

    async def fail(self, error: PageinError | None) -> web.StreamResponse:
        """Answer with an error, None being a fault of Pagein itself: a status where one can be sent, else an event."""
        if not self.begun:
            return response_of(error) if error is not None else _internal()
        return await self._fail_stream(problem(error) if error is not None else internal_problem())

    async def pass_failure(self, status: int, content_type: str, body: bytes) -> web.StreamResponse:
        """Answer with the worker's own error."""
        if not self.begun:
            return await self.whole(status, content_type, body)
        return await self._fail_stream(as_event(status, body))

    async def _fail_stream(self, value: dict[str, Any]) -> web.StreamResponse:
        if not self._events:
            return self.abort()  # a cut connection is the only honest end of half an answer
        await self._send(sse.event(value))
        return await self.end()

    def abort(self) -> web.StreamResponse:
        """Cut the connection, and return what the server wants to see as the answer."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return self._stream if self._stream is not None else web.Response(status=CLIENT_LEFT)


def _told_of_state(prepared: Prepared) -> dict[str, str]:
    """Headers are of printable ASCII, and short."""
    told = {}
    if prepared.tokens is not None:
        told["X-Pagein-Restored-Tokens"] = str(prepared.restored)
    if prepared.seconds is not None:
        told["X-Pagein-Restore-Ms"] = str(round(prepared.seconds * 1000))
    if prepared.miss is not None:
        told["X-Pagein-Restore-Miss"] = f"{prepared.kind}: {_printable(prepared.miss)}"
    return told


def _told_by_worker(counted: Counted) -> dict[str, str]:
    """The same of a worker that restores by itself, which says so with its answer only."""
    if counted.restored is None:
        return {}
    told = {"X-Pagein-Restored-Tokens": str(counted.restored)}
    if counted.miss is not None:
        told["X-Pagein-Restore-Miss"] = _printable(counted.miss)
    return told


def _printable(text: str) -> str:
    return " ".join(text.encode("ascii", "replace").decode()[:200].split())


def _internal() -> web.Response:
    return web.json_response(internal_problem(), status=500)
