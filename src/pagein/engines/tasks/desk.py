"""The HTTP side of a split model: which task a request is for, and what it is asked."""

from __future__ import annotations

import secrets

from aiohttp import web

from pagein.engines.local.door import Handler
from pagein.engines.local.labels import labels_answer, read_texts, tags_answer
from pagein.engines.local.write import WriterDesk
from pagein.engines.tasks.crew import Crew
from pagein.engines.tasks.house import Guest, House
from pagein.engines.tasks.writer import TaskWriter
from pagein.protocol import KV_TENANT_HEADER, ROUTE_HEADER, TASK_HEADER, Capability


class TaskDesk(WriterDesk[TaskWriter]):
    """Answers the paths of all kinds of tasks; the task of a request must be of the path's."""

    def __init__(self, name: str, house: House, crew: Crew, parallel: int) -> None:
        super().__init__(name, parallel)
        self._house, self._crew = house, crew

    def writer_for(self, request: web.Request, capability: Capability) -> TaskWriter:
        """Return the task that the daemon's header names, for this request; nobody else reaches the socket."""
        served = self._house.book.wanted(request.headers.get(TASK_HEADER), capability)
        key = request.headers.get(ROUTE_HEADER) or secrets.token_hex(8)
        guest = Guest(key, request.headers.get(KV_TENANT_HEADER, ""))
        return TaskWriter(self.name, served, self._house, self._crew, guest)

    def beats(self) -> int:
        """Return the steps of the crew, and the bytes of parts that came in."""
        return self._crew.beats + self._house.parts.bytes_read

    def handlers(self) -> dict[Capability, Handler]:
        """Return what answers each path: a task that joins later finds its path there."""
        return {
            **super().handlers(),
            Capability.TEXT_CLASSIFICATION: self._classify,
            Capability.TOKEN_CLASSIFICATION: self._tag,
        }

    async def _classify(self, request: web.Request) -> web.Response:
        capability = Capability.TEXT_CLASSIFICATION
        work = self.writer_for(request, capability).classify(await read_texts(request))
        return await self.answered(request, capability, work, lambda found: labels_answer(self.name, found))

    async def _tag(self, request: web.Request) -> web.Response:
        capability = Capability.TOKEN_CLASSIFICATION
        work = self.writer_for(request, capability).tag(await read_texts(request))
        return await self.answered(request, capability, work, lambda found: tags_answer(self.name, found))
