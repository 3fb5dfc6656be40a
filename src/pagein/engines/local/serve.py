"""The HTTP side of a model that answers one capability: requests in order through one compute thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from pagein.engines.local import pictures, speech, texts
from pagein.engines.local.answer import Work
from pagein.engines.local.compute import ComputeThread
from pagein.engines.local.door import Door, as_failure
from pagein.engines.local.model import LocalModel
from pagein.engines.local.sleep import Bed, Sleeper
from pagein.protocol import PATHS, Capability, Endpoint, WorkerSpec
from pagein.units import format_duration

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
        self._door = Door(spec, self._add_routes)

    def start(self) -> Endpoint:
        """Answer on the socket from now on; blocks until then. Raises LoadFailed when the socket cannot be made."""
        return self._door.open()

    def wait(self) -> str:
        """Block until the server has ended and return why."""
        return self._door.wait()

    def stop(self) -> None:
        """Close the socket; requests that run get two seconds. Idempotent, and callable from any thread."""
        self._door.close()
        self._compute.stop()

    def _add_routes(self, router: web.UrlDispatcher) -> None:
        capability = self._model.capability
        slots = asyncio.Semaphore(self._spec.parallel)

        async def infer(request: web.Request) -> web.Response:
            async with slots:
                return await self._infer(request, _READERS[capability])

        router.add_post(PATHS[capability], infer)
        if self._bed is not None:
            self._bed.add_routes(router)

    async def _infer(self, request: web.Request, read: Reader) -> web.Response:
        work = await read(self._spec.name, self._model, request)
        work = work if self._bed is None else self._bed.awake(work)
        try:
            done = await self._compute.run(work)
        except Exception as error:
            raise as_failure(self._spec.name, error) from error
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
