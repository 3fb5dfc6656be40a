"""Connections to the workers: one keep-alive pool per model, made on first use, replaced when its worker is."""

from __future__ import annotations

import io
import select
from collections.abc import Callable
from contextvars import ContextVar
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from pagein.errors import BadAnswer
from pagein.gateway.answers import excerpt
from pagein.gateway.call import Call, request_id
from pagein.gateway.ports import Lease
from pagein.protocol import PATHS, QUIET, SIGNS, SILENCE_HEADER, Endpoint

_KEEP_ALIVE = 4.0
"""Seconds; below the 5 s after which llama-server's HTTP library closes idle connections."""
_ONE_WRITE = 1024 * 1024
"""Larger bodies are written in pieces, so that other requests get their turn in between."""
_ATTEMPTS = 3
_INTERIM = 100
"""Interim answers (1xx) that may come at once before the answer itself; with time more of them."""
_MORE = 3
"""Times that a worker which shows life may do so as often as it has to."""
_on_life: ContextVar[tuple[Callable[[], None] | None, float]] = ContextVar("on_life", default=(None, QUIET))
"""Of the request that a task sends: told of each interim answer, by which a worker that computes for long shows so; and
after how many seconds it has to."""


class WorkerBroke(Exception):
    """The connection to the worker could not be made, or ended before the answer did; the desk explains it."""


class Upstreams:
    """The HTTP client side of the gateway."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[Endpoint, aiohttp.ClientSession]] = {}

    async def post(self, lease: Lease, call: Call, on_life: Callable[[], None]) -> aiohttp.ClientResponse:
        """Send a call to the worker of a lease and return its answer with the body unread.

        ``on_life`` is told of each sign of life before that: a worker that computes for minutes sends interim answers.
        Raises WorkerBroke, and BadAnswer where something came that is no HTTP. A worker may close an idle connection in
        the moment it is used again, which shows as a reused connection that ends without a byte of answer. Only then
        the call is sent again.
        """
        session = await self._session(lease)
        quiet = min(QUIET, lease.timeout / SIGNS)
        _on_life.set((on_life, quiet))
        url = _url(lease.endpoint, PATHS[call.capability])
        own = {"Content-Type": call.content_type, "Accept-Encoding": "identity", "X-Request-Id": request_id.get()}
        if quiet < QUIET:
            own[SILENCE_HEADER] = f"{lease.timeout:g}"
        headers = {**call.headers, **own}
        for attempt in range(1, _ATTEMPTS + 1):
            seen: dict[str, bool] = {}
            data = call.body if len(call.body) < _ONE_WRITE else io.BytesIO(call.body)
            try:
                return await session.post(
                    url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=seen
                )
            except aiohttp.ClientResponseError as error:
                told = excerpt(error.message.encode("utf-8", "replace"))
                raise BadAnswer(f"the worker of {lease.model!r} did not answer in HTTP: {told}") from None
            except (aiohttp.ClientError, OSError) as error:
                if "reused" not in seen or attempt == _ATTEMPTS:
                    raise WorkerBroke(str(error)) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """Close all connections."""
        pools, self._pools = self._pools, {}
        for _, session in pools.values():
            await session.close()

    async def _session(self, lease: Lease) -> aiohttp.ClientSession:
        known = self._pools.get(lease.model)
        if known is not None and known[0] == lease.endpoint:
            return known[1]
        fresh = _open(lease.endpoint)
        self._pools[lease.model] = (lease.endpoint, fresh)
        if known is not None:
            await known[1].close()  # its worker is gone
        return fresh


class _Wire(ResponseHandler):
    """A connection that bears a few interim answers (1xx) and no flood of them, which would take the loop's time."""

    _interim = 0
    _since = 0.0
    _quiet = QUIET
    _told: Callable[[], None] | None = None

    def set_response_params(self, **params: Any) -> None:
        """Called by aiohttp before each request, in its task."""
        self._interim, self._since = 0, self._loop.time()
        self._told, self._quiet = _on_life.get()
        super().set_response_params(**params)

    def feed_data(self, data: Any, size: int = 0) -> None:
        """Called by aiohttp with the head of each answer."""
        if data[0].code < 200:
            self._interim += 1
            if self._told is not None:
                self._told()
        if self._interim <= _INTERIM + (self._loop.time() - self._since) * _MORE / self._quiet:
            super().feed_data(data, size)
        elif self.transport is not None:
            self.transport.close()
            self.set_exception(HttpProcessingError(message=f"more than {_INTERIM} interim answers", headers=None))


class _CleanPool(aiohttp.BaseConnector):
    """Reuses no connection on which something came after the end of the last answer.

    A worker that sends more than it announced would else answer the next request, of another client, with the rest
    of the last one. What a closed connection shows is the same sign: there is something to read.
    """

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        factory: Any = partial(_Wire, loop=self._loop)
        self._factory = factory

    async def _get(self, key: Any, traces: Any) -> Connection | None:
        while (connection := await super()._get(key, traces)) is not None:
            if _is_clean(connection):
                return connection
            connection.close()
        return None


class _SocketPool(_CleanPool, aiohttp.UnixConnector):
    """Connections to a Unix socket."""


class _PortPool(_CleanPool, aiohttp.TCPConnector):
    """Connections to a loopback port."""


def _is_clean(connection: Connection) -> bool:
    protocol, transport = connection.protocol, connection.transport
    if protocol is None or protocol.should_close or transport is None:
        return False
    descriptor = transport.get_extra_info("socket").fileno()
    if descriptor < 0:
        return False
    looking = select.poll()
    looking.register(descriptor, select.POLLIN)
    return not looking.poll(0)


@lru_cache(maxsize=64)
def _url(endpoint: Endpoint, path: str) -> URL:
    host = "worker" if endpoint.socket is not None else f"{endpoint.host}:{endpoint.port}"
    return URL(f"http://{host}{path}")


def _open(endpoint: Endpoint) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if endpoint.socket is not None:
        connector = _SocketPool(endpoint.socket, limit=0, keepalive_timeout=_KEEP_ALIVE)
    else:
        connector = _PortPool(limit=0, keepalive_timeout=_KEEP_ALIVE, use_dns_cache=False)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),
        skip_auto_headers=("User-Agent",),
        trace_configs=[_REUSE],
    )


async def _mark_reused(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionReuseconnParams
) -> None:
    context.trace_request_ctx["reused"] = True


async def _mark_fresh(
    session: aiohttp.ClientSession, context: SimpleNamespace, params: aiohttp.TraceConnectionCreateStartParams
) -> None:
    context.trace_request_ctx.pop("reused", None)


_REUSE = aiohttp.TraceConfig()
_REUSE.on_connection_reuseconn.append(_mark_reused)
_REUSE.on_connection_create_start.append(_mark_fresh)
_REUSE.freeze()
