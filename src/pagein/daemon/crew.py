"""The workers of a fleet, and the tasks that something is done to them in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from pagein.daemon.worker import Worker
from pagein.protocol import Ready
from pagein.supervisor.child import Child

_log = logging.getLogger("pagein.fleet")


class Crew:
    """At most one worker per model at any time; belongs to the event loop's thread."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.gone: dict[str, Worker] = {}
        """The last worker of each model that ended, to explain connections that broke with it."""
        self.last_ready: dict[str, Ready] = {}
        """What the newest worker of each model said, also after it went."""
        self.tasks: set[asyncio.Task[None]] = set()

    def live(self, name: str) -> Child | None:
        """The live worker's process, None when there is none."""
        worker = self.workers.get(name)
        return worker.child if worker is not None and not worker.over else None

    def spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Run work beside everything else; a fault of it is logged."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self.tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a task of the fleet failed", exc_info=fault)

    async def cancel_all(self) -> None:
        """Call every task off, and wait until all have ended."""
        for task in list(self.tasks):
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)
