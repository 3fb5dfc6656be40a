"""The HTTP side of a model in this process: a Unix socket, an event loop in a thread of its own, a compute thread."""

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
from typing import Any

from aiohttp import web

from pagein.engines.local import pictures, speech, texts
from pagein.engines.local.answer import Work
from pagein.engines.local.compute import ComputeThread
from pagein.engines.local.model import LocalModel
from pagein.engines.local.sleep import Bed, Sleeper
from pagein.errors import InferenceFailed, LoadFailed, PageinError, RequestTooLarge
from pagein.protocol import HEALTH_PATH, PATHS, Capability, Endpoint, WorkerSpec
from pagein.units import format_duration

_BODY_LIMIT = 256 * 1024**2
"""The gateway enforces the configured limit; this only bounds what a fault could bring into the worker's memory."""
_STOP_SECONDS = 2.0
_LONGEST_SOCKET = 103
"""Bytes of a Unix socket's path that every system takes (macOS: 104 with the closing zero)."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Reader = Callable[[str, Any, web.Request], Awaitable[Work]]
_READERS: dict[Capability, Reader] = {
    Capability.EMBEDDING: texts.embeddings,
    Capability.RERANK: texts.rerank,
    Capability.CLASSIFICATION: pictures.classifications,
    Capability.SALIENCY: pictures.saliency,
    Capability.TRANSCRIPTION: speech.transcriptions,
}


class LocalServer:
    """Serves one model until it is stopped.

    At most ``spec.parallel`` requests are held at once, bodies included; further ones wait unread on their connections.
    A client that leaves before its work has started takes it along; one that leaves later is remembered by the work.
    """

    def __init__(self, spec: WorkerSpec, model: LocalModel, sleeper: Sleeper | None = None) -> None:
        """``sleeper`` is given by engines that can sleep."""
        self._spec, self._model = spec, model
        self._compute = ComputeThread()
        self._bed = None if sleeper is None else Bed(spec.name, sleeper, self._compute)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._ended = threading.Event()
        self._why = "it was stopped"
        self._socket = Path(spec.socket_dir) / f"{secrets.token_hex(4)}.sock"

    def start(self) -> Endpoint:
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

    def stop(self) -> None:
        """Close the socket; requests that run get two seconds. Idempotent, and callable from any thread."""
        if self._loop is not None and not self._ended.is_set():
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._ended.wait(_STOP_SECONDS * 2)
        self._compute.stop()

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
            await self._stopping.wait()
        finally:
            await runner.cleanup()
            self._socket.unlink(missing_ok=True)

    def _app(self) -> web.Application:
        app = web.Application(client_max_size=_BODY_LIMIT, middlewares=[_problems])
        capability = self._model.capability
        slots = asyncio.Semaphore(self._spec.parallel)

        async def infer(request: web.Request) -> web.Response:
            async with slots:
                return await self._infer(request, _READERS[capability])

        async def health(_: web.Request) -> web.Response:
            return web.json_response({"status": "ok", "model": self._spec.name})

        app.router.add_post(PATHS[capability], infer)
        app.router.add_get(HEALTH_PATH, health)
        if self._bed is not None:
            self._bed.add_routes(app.router)
        return app

    async def _infer(self, request: web.Request, read: Reader) -> web.Response:
        work = await read(self._spec.name, self._model, request)
        work = work if self._bed is None else self._bed.awake(work)
        try:
            done = await self._compute.run(work)
        except (PageinError, asyncio.CancelledError):
            raise
        except Exception as error:
            traceback.print_exc()
            reason = str(error).strip().splitlines() or [""]
            raise InferenceFailed(self._spec.name, f"{type(error).__name__}: {reason[0][:300]}") from error
        print(  # to the model's log, beside the daemon's own line about this request
            f"{self._model.capability}: {done.value.note}, waited {format_duration(done.waited)}, "
            f"computed {format_duration(done.took)}",
            flush=True,
        )
        timing = f"wait;dur={done.waited * 1000:.1f}, compute;dur={done.took * 1000:.1f}"
        return web.Response(
            body=done.value.body,
            content_type=done.value.content_type,
            charset="utf-8",
            headers={"Server-Timing": timing},
        )


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turn every error into OpenAI's shape."""
    try:
        return await handler(request)
    except PageinError as error:
        return _problem(error)
    except web.HTTPRequestEntityTooLarge:
        return _problem(RequestTooLarge(None, _BODY_LIMIT))
    except web.HTTPException as error:
        return _body(error.status, {"message": error.reason, "type": "invalid_request_error", "code": "http_error"})
    except Exception:
        traceback.print_exc()
        message = "the worker failed on this request; the model's log says why"
        return _body(500, {"message": message, "type": "server_error", "code": "internal_error"})


def _problem(error: PageinError) -> web.Response:
    kind = "invalid_request_error" if error.http_status < 500 else "server_error"
    details = {"param": None, "hint": error.hint, **error.details}
    return _body(error.http_status, {"message": error.message, "type": kind, "code": error.code, **details})


def _body(status: int, error: dict[str, object]) -> web.Response:
    return web.Response(status=status, body=json.dumps({"error": error}).encode(), content_type="application/json")
