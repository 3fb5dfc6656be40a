"""A Unix socket with an HTTP server behind it, on an event loop in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import secrets
import threading
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from pagein.errors import InferenceFailed, LoadFailed, PageinError, RequestTooLarge
from pagein.protocol import HEALTH_PATH, Endpoint, WorkerSpec

_BODY_LIMIT = 256 * 1024**2
"""The gateway enforces the configured limit; this only bounds what a fault could bring into the worker's memory."""
_STOP_SECONDS = 2.0
_LONGEST_SOCKET = 103
"""Bytes of a Unix socket's path that every system takes (macOS: 104 with the closing zero)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Door:
    """Answers the paths of one worker until it is closed."""

    def __init__(self, spec: WorkerSpec, add_routes: Callable[[web.UrlDispatcher], None]) -> None:
        """``add_routes`` is called on the event loop."""
        self._name, self._add_routes = spec.name, add_routes
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._ended = threading.Event()
        self._why = "it was stopped"
        self._socket = Path(spec.socket_dir) / f"{secrets.token_hex(4)}.sock"

    def open(self) -> Endpoint:
        """Answer on the socket from now on; blocks until then. Raises LoadFailed when the socket cannot be made."""
        if len(os.fsencode(self._socket)) > _LONGEST_SOCKET:
            length = len(os.fsencode(self._socket))
            raise LoadFailed(f"the socket path has {length} bytes, systems take {_LONGEST_SOCKET}: {self._socket}")
        ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        threading.Thread(target=self._run, args=(ready,), name="http", daemon=True).start()
        ready.result()
        return Endpoint(socket=str(self._socket))

    def wait(self) -> str:
        """Block until the server has ended and return why."""
        self._ended.wait()
        return self._why

    def close(self, why: str | None = None) -> None:
        """Close the socket; requests that run get two seconds. Idempotent, and callable from any thread but its own."""
        if why is not None and not self._ended.is_set():
            self._why = why
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._ended.wait(_STOP_SECONDS * 2)

    def _run(self, ready: concurrent.futures.Future[None]) -> None:
        try:
            asyncio.run(self._serve(ready))
        except BaseException as error:  # the thread must not end without telling the two who wait for it
            self._why = f"its HTTP server broke: {error}"
            if not ready.done():
                ready.set_exception(LoadFailed(f"the socket {self._socket} cannot be used: {error}"))
        finally:
            self._ended.set()

    async def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        runner = web.AppRunner(self._app(), access_log=None, handler_cancellation=True, shutdown_timeout=_STOP_SECONDS)
        await runner.setup()
        try:
            await web.UnixSite(runner, self._socket).start()
            self._socket.chmod(0o600)
            ready.set_result(None)
            await self._closing.wait()
        finally:
            await runner.cleanup()
            self._socket.unlink(missing_ok=True)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[_problems])

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok", "model": self._name})

        app.router.add_get(HEALTH_PATH, health)
        self._add_routes(app.router)
        return app


def as_failure(model: str, error: Exception) -> PageinError:
    """What a client is told of a fault inside the model; the whole of it goes to the model's log."""
    if isinstance(error, PageinError):
        return error
    traceback.print_exception(error)
    reason = str(error).strip().splitlines() or [""]
    return InferenceFailed(model, f"{type(error).__name__}: {reason[0][:300]}")


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into OpenAI's shape."""
    try:
        return await handler(request)
    except PageinError as error:
        return _response(error.http_status, problem(error))
    except web.HTTPRequestEntityTooLarge:
        large = RequestTooLarge(None, _BODY_LIMIT)
        return _response(large.http_status, problem(large))
    except web.HTTPException as error:
        told: dict[str, object] = {"message": error.reason, "type": "invalid_request_error", "code": "http_error"}
        return _response(error.status, told)
    except Exception:
        traceback.print_exc()
        message = "the worker failed on this request; the model's log says why"
        return _response(500, {"message": message, "type": "server_error", "code": "internal_error"})


def problem(error: PageinError) -> dict[str, object]:
    """Return an error as OpenAI's object."""
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    details = {"param": None, "hint": error.hint, **error.details}
    return {"message": error.message, "type": kind, "code": error.code, **details}


def _response(status: int, error: dict[str, object]) -> web.Response:
    return web.Response(status=status, body=json.dumps({"error": error}).encode(), content_type="application/json")
