"""The way of one call: lease, worker, answer, release.

1. wait for a lease (a streaming client gets heartbeats meanwhile, another one waits at most `server.plain_wait`);
2. send the call to the worker and wait for its answer to begin;
3. pass the answer on, byte by byte as it comes;
4. whatever ends it — last byte, error, silence, disconnect — the lease is given back exactly once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from dataclasses import replace
from types import TracebackType

import aiohttp
from aiohttp import web

from pagein.config.schema import Server
from pagein.errors import BadAnswer, PageinError, WaitTooLong, WorkerTimeout
from pagein.gateway.call import Call, request_id
from pagein.gateway.metrics import Metrics, Visit
from pagein.gateway.ports import Desk, Lease, Prepared
from pagein.gateway.relay import Silence, relay
from pagein.gateway.reply import CLIENT_LEFT, Reply
from pagein.gateway.tasks import task_headers
from pagein.gateway.upstream import Upstreams, WorkerBroke
from pagein.gateway.waiting import Queue, check_context, in_time, patiently
from pagein.protocol import PATHS

log = logging.getLogger(__name__)


class Proxy:
    """Answers calls to models by their workers."""

    def __init__(self, desk: Desk, upstreams: Upstreams, metrics: Metrics, settings: Server) -> None:
        self._desk = desk
        self._upstreams = upstreams
        self._metrics = metrics
        self.heartbeat = settings.heartbeat
        self.plain_wait = settings.plain_wait

    async def serve(
        self, request: web.Request, reading: Awaitable[Call], reply: Reply | None = None
    ) -> web.StreamResponse:
        """Answer one request; never raises but for cancellation, which means that the client left.

        ``reply`` writes the answer in another shape than the worker's.
        """
        reply = reply if reply is not None else Reply(request)
        with self._metrics.visit() as visit:
            try:
                call = await reading
                visit.is_for(call)
                response = await self._answer(call, reply, visit)
            except PageinError as error:
                visit.failed(error)
                response = await _last_word(reply, error)
            except ConnectionError:
                response = reply.abort()
            except Exception:
                log.exception("request %s failed", request_id.get())
                visit.status = 500
                response = await _last_word(reply, None)
        return response

    async def _answer(self, call: Call, reply: Reply, visit: Visit) -> web.StreamResponse:
        if call.wishes.context is not None:  # before it waits, so that no load begins for what is refused then
            check_context(call, next((m.context for m in self._desk.status().models if m.name == call.model), None))
        lease = await self._lease(call, reply)
        with Use(self._desk, lease, reply) as use:
            visit.granted(lease)
            check_context(call, lease.context)
            prepared = await self._prepare(lease, call, reply)
            call = replace(call, body=prepared.body, headers={**prepared.headers, **task_headers(call)})
            try:
                async with asyncio.timeout(lease.timeout) as clock:
                    await reply.leased(lease, prepared)
                    use.status, response = await self._exchange(call, lease, reply, clock)
            except TimeoutError:
                if reply.writing:
                    raise ConnectionResetError("the client stopped reading") from None
                silent = WorkerTimeout(lease.model, lease.timeout)
                raise silent.with_output(self._desk.last_lines(lease.model)) from None
            except BadAnswer as error:
                raise error.with_output(self._desk.last_lines(lease.model)) from None
            except WorkerBroke:
                raise await self._desk.why_gone(lease) from None
            finally:
                self._desk.account(lease, prepared, reply.counted, reply.answered)
        visit.status = use.status
        return response

    async def _prepare(self, lease: Lease, call: Call, reply: Reply) -> Prepared:
        preparing = self._desk.prepare(lease, PATHS[call.capability], call.body, call.turn)
        if not call.stream:
            return await preparing

        def undo(late: Prepared) -> None:
            self._desk.account(lease, late, None)

        return await patiently(preparing, reply, self.heartbeat, lambda: f"{call.model} remembers", undo)

    async def _lease(self, call: Call, reply: Reply) -> Lease:
        queue = Queue(call.model)
        acquiring = self._desk.acquire(call.model, call.capability, queue.on_wait, call.wishes.keep_alive)
        try:
            if call.stream:
                return await patiently(acquiring, reply, self.heartbeat, queue.told, self._give_back_unused)
            return await in_time(self.plain_wait, acquiring, queue, self._desk)
        except WaitTooLong as error:
            queue.add_to(error)
            raise

    def _give_back_unused(self, lease: Lease) -> None:
        self._desk.release(lease, CLIENT_LEFT, 0.0)

    async def _exchange(
        self, call: Call, lease: Lease, reply: Reply, clock: asyncio.Timeout
    ) -> tuple[int, web.StreamResponse]:
        silence = Silence(clock, lease.timeout)
        sending = self._upstreams.post(lease, call, silence.broken)
        if call.stream:
            told = f"{call.model} is working"
            upstream = await patiently(sending, reply, self.heartbeat, lambda: told, aiohttp.ClientResponse.close)
        else:
            upstream = await sending
        try:
            return upstream.status, await relay(call, upstream, reply, silence)
        finally:
            upstream.close()  # after the last byte the connection is back in its pool and this does nothing


class Use:
    """A lease in use, given back exactly once with the status that its client saw."""

    def __init__(self, desk: Desk, lease: Lease, reply: Reply) -> None:
        self._desk = desk
        self._lease = lease
        self._reply = reply
        self._since = time.monotonic()
        self.status = CLIENT_LEFT

    def __enter__(self) -> Use:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PageinError):
            self.status = error.http_status
        elif isinstance(error, ConnectionError | asyncio.CancelledError):
            self.status = 200 if self._reply.told_all else CLIENT_LEFT
        elif error is not None:
            self.status = 500
        self._desk.release(self._lease, self.status, time.monotonic() - self._since)


async def _last_word(reply: Reply, error: PageinError | None) -> web.StreamResponse:
    try:
        return await reply.fail(error)
    except ConnectionError:
        return reply.abort()
