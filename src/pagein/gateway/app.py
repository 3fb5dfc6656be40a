"""The gateway put together: paths, the door before them, and what stands and falls with the server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web
from aiohttp.typedefs import Middleware

from pagein.config.schema import Server
from pagein.errors import PageinError
from pagein.gateway.admin import Admin
from pagein.gateway.auth import Door
from pagein.gateway.call import Call, request_id
from pagein.gateway.chat_sessions import HEADER, ChatSessions
from pagein.gateway.conversations import Conversations
from pagein.gateway.kept_turns import KeptTurns
from pagein.gateway.leases import Leases
from pagein.gateway.metrics import Metrics
from pagein.gateway.native import read_run
from pagein.gateway.openai import read_openai
from pagein.gateway.parts import PartsPaths
from pagein.gateway.ports import Desk
from pagein.gateway.problems import internal_problem, response_of, response_of_http
from pagein.gateway.proxy import Proxy
from pagein.gateway.responses import Responses
from pagein.gateway.session_ports import Sessions
from pagein.gateway.snapshots import SnapshotPaths
from pagein.gateway.state import State
from pagein.gateway.turnstile import Turnstile
from pagein.gateway.upstream import Upstreams
from pagein.protocol import PATHS, Capability

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
log = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._\-]{1,64}")


def make_app(desk: Desk, settings: Server, version: str, sessions: Sessions | None = None) -> web.Application:
    """Build the application; run it with `make_runner`, which ends calls whose client has left.

    Without ``sessions`` no conversation is kept, and what needs one is refused.
    """
    metrics = Metrics(desk)
    upstreams = Upstreams()
    proxy = Proxy(desk, upstreams, metrics, settings)
    door = Door(settings)
    app = web.Application(middlewares=[_guard(door)], client_max_size=settings.max_body)
    app.add_routes(Admin(desk, metrics, settings.heartbeat).routes())
    app.add_routes(PartsPaths(desk).routes())
    app.add_routes(Leases(desk).routes())
    tenant = _tenant(door, sessions)
    turns = KeptTurns(proxy, sessions, Turnstile(), tenant, settings.max_body)
    app.add_routes(_model_routes(desk, proxy, ChatSessions(turns), settings.max_body))
    app.add_routes(Responses(turns, desk).routes())
    app.add_routes(Conversations(sessions, tenant, settings.max_body).routes())
    app.add_routes(State(sessions, tenant).routes())
    app.add_routes(SnapshotPaths(desk).routes())
    app.on_response_prepare.append(_mark(door, version))
    app.cleanup_ctx.append(_lifetime(desk, metrics, upstreams))
    return app


def make_runner(app: web.Application, grace: float = 5.0) -> web.AppRunner:
    """Return the runner for an application: a disconnect cancels its handler, which gives the lease back.

    Its ``cleanup`` lets open requests finish for ``grace`` seconds and then cancels them. Event streams end with the
    desk's subscription, so end that first.
    """
    # aiohttp waits this time twice, and reads 0 as "for ever"
    timeout = max(grace / 2, 0.01)
    return web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=timeout)


def _tenant(door: Door, sessions: Sessions | None) -> Callable[[web.Request], str]:
    def tenant(request: web.Request) -> str:
        return sessions.tenant_of(door.key_of(request)) if sessions is not None else ""

    return tenant


def _model_routes(desk: Desk, proxy: Proxy, chats: ChatSessions, limit: int) -> list[web.RouteDef]:
    async def serve(request: web.Request, reading: Awaitable[Call]) -> web.StreamResponse:
        way = chats if HEADER in request.headers else proxy
        return await way.serve(request, reading)

    def openai(capability: Capability) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            return await serve(request, read_openai(request, desk, capability, limit))

        return handle

    async def run(request: web.Request) -> web.StreamResponse:
        return await serve(request, read_run(request, desk, limit))

    paths = [*PATHS.items(), (Capability.RERANK, "/rerank")]
    return [*(web.post(path, openai(capability)) for capability, path in paths), web.post("/run/{model}", run)]


def _guard(door: Door) -> Middleware:
    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("X-Request-Id", "")
        request_id.set(given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex)
        try:
            preflight = door.preflight(request)
            if preflight is not None:
                return preflight
            door.check(request)
            return await handler(request)
        except PageinError as error:
            return response_of(error)
        except web.HTTPException as error:
            return response_of_http(error, request)
        except ConnectionError:
            return web.Response(status=499)  # the client has left: nobody will read it
        except Exception:
            log.exception("request %s failed", request_id.get())
            if request.writer.output_size > 0:
                raise ConnectionResetError("half an answer is sent: only the cut connection can say so") from None
            return web.json_response(internal_problem(), status=500)

    return guard


def _mark(door: Door, version: str) -> Callable[[web.Request, web.StreamResponse], Awaitable[None]]:
    async def mark(request: web.Request, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = request_id.get()
        response.headers["Server"] = server
        door.mark(request, response)

    server = f"pagein/{version}"
    return mark


def _lifetime(desk: Desk, metrics: Metrics, upstreams: Upstreams) -> Callable[[web.Application], AsyncIterator[None]]:
    async def lifetime(app: web.Application) -> AsyncIterator[None]:
        counting = asyncio.create_task(_count(desk, metrics))
        yield
        counting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await counting
        await upstreams.close()

    return lifetime


async def _count(desk: Desk, metrics: Metrics) -> None:
    async for decision in desk.subscribe():
        metrics.decided(decision)
