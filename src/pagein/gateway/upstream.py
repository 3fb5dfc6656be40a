"""Connections to the workers: one keep-alive pool per model, made on first use, replaced when its worker is."""

from __future__ import annotations

import io
from functools import lru_cache
from types import SimpleNamespace

import aiohttp
from yarl import URL

from pagein.gateway.call import Call, request_id
from pagein.gateway.ports import Lease
from pagein.protocol import PATHS, Endpoint

_KEEP_ALIVE = 4.0
"""Seconds; below the 5 s after which llama-server's HTTP library closes idle connections."""
_ONE_WRITE = 1024 * 1024
"""Larger bodies are written in pieces, so that other requests get their turn in between."""
_ATTEMPTS = 3


class WorkerBroke(Exception):
    """The connection to the worker could not be made, or ended before the answer did; the desk explains it."""


class Upstreams:
    """The HTTP client side of the gateway."""

    def __init__(self) -> None:
        self._pools: dict[str, tuple[Endpoint, aiohttp.ClientSession]] = {}

    async def post(self, lease: Lease, call: Call) -> aiohttp.ClientResponse:
        """Send a call to the worker of a lease and return its answer with the body unread; raises WorkerBroke.

        A worker may close an idle connection in the moment it is used again, which shows as a reused connection that
        ends without a byte of answer. Only then the call is sent again.
        """
        session = self._session(lease)
        url = _url(lease.endpoint, PATHS[call.capability])
        headers = {"Content-Type": call.content_type, "Accept-Encoding": "identity", "X-Request-Id": request_id.get()}
        for attempt in range(1, _ATTEMPTS + 1):
            seen: dict[str, bool] = {}
            data = call.body if len(call.body) < _ONE_WRITE else io.BytesIO(call.body)
            try:
                return await session.post(
                    url, data=data, headers=headers, allow_redirects=False, trace_request_ctx=seen
                )
            except (aiohttp.ClientError, OSError) as error:
                if "reused" not in seen or attempt == _ATTEMPTS:
                    raise WorkerBroke(str(error)) from error
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def close(self) -> None:
        """Close all connections."""
        pools, self._pools = self._pools, {}
        for _, session in pools.values():
            await session.close()

    def _session(self, lease: Lease) -> aiohttp.ClientSession:
        known = self._pools.get(lease.model)
        if known is not None and known[0] == lease.endpoint:
            return known[1]
        fresh = _open(lease.endpoint)
        self._pools[lease.model] = (lease.endpoint, fresh)
        if known is not None:
            known[1].detach()  # its worker is gone, and the sockets of a process that ended are closed already
        return fresh


@lru_cache(maxsize=512)
def _url(endpoint: Endpoint, path: str) -> URL:
    host = "worker" if endpoint.socket is not None else f"{endpoint.host}:{endpoint.port}"
    return URL(f"http://{host}{path}")


def _open(endpoint: Endpoint) -> aiohttp.ClientSession:
    connector: aiohttp.BaseConnector
    if endpoint.socket is not None:
        connector = aiohttp.UnixConnector(endpoint.socket, limit=0, keepalive_timeout=_KEEP_ALIVE)
    else:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE, use_dns_cache=False)
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


_REUSE = aiohttp.TraceConfig()
_REUSE.on_connection_reuseconn.append(_mark_reused)
_REUSE.freeze()
