"""The ends of workers: told to leave, ended by themselves, maimed by the kernel; and whether their memory is back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from pagein.daemon.crew import Crew
from pagein.daemon.inbox import Inbox
from pagein.daemon.keeper import Keeper
from pagein.daemon.logs import ModelLogs
from pagein.daemon.meter import Meter
from pagein.daemon.release import Leftovers, Release
from pagein.daemon.roster import Roster
from pagein.daemon.worker import Worker
from pagein.errors import LoadFailed, Outgrown, PageinError, WorkerDied
from pagein.protocol import Endpoint
from pagein.scheduler import events as ev
from pagein.supervisor.child import Child

_log = logging.getLogger("pagein.fleet")


class Endings:
    """Ends workers, and posts how they ended and that their memory is back."""

    def __init__(
        self, crew: Crew, roster: Roster, inbox: Inbox, meter: Meter, logs: ModelLogs, keeper: Keeper | None
    ) -> None:
        self._crew, self._roster, self._inbox, self._meter = crew, roster, inbox, meter
        self._logs, self._keeper, self._left = logs, keeper, Leftovers()

    # ── told to ─────────────────────────────────────────────────────────────────────────────────

    def tell(self, name: str, why: PageinError, grace: float) -> None:
        """Begin to end the worker of a model, unless it ended by itself a moment ago, which was reported."""
        worker = self._crew.workers.get(name)
        if worker is None or worker.over:
            return
        worker.told = why
        self._crew.spawn(self._end(name, worker, grace))

    async def _end(self, name: str, worker: Worker, grace: float) -> None:
        began = time.monotonic()
        if self._keeper is not None and grace > 0 and worker.announced:
            await self._keeper.end(name)
        await self.end_process(name, worker, grace)
        reason = worker.told.message if worker.told is not None else ""
        await self._over(name, worker, ev.Stopped(name), reason, began)

    async def end_process(self, name: str, worker: Worker, grace: float) -> None:
        """End the tree of a worker that was told to leave; may be called again with less grace meanwhile."""
        try:
            if worker.child is None and worker.start is not None:
                if not worker.start.cancelling():  # a second cancellation would not wait for the end of the tree
                    worker.start.cancel()
                await asyncio.wait([worker.start])
            if worker.child is not None:
                await (worker.child.stop(grace) if grace > 0 else worker.child.kill())
        except Exception:  # `Release` looks at what is left
            _log.exception("ending %s failed", name)

    async def shut(self, name: str, worker: Worker, grace: float) -> None:
        """End a worker since the daemon stops; nobody measures what comes back."""
        began, before = time.monotonic(), dict(self._meter.last(name))
        worker.told = worker.told or WorkerDied("the daemon stops")
        if self._keeper is not None and grace > 0 and worker.announced:
            await self._keeper.end(name)
        await self.end_process(name, worker, grace)
        if worker.cell is not None:
            await asyncio.to_thread(worker.cell.kill)
            await asyncio.to_thread(worker.cell.remove)
        if not worker.over:
            worker.over = True
            unloaded = dict.fromkeys(before, 0)
            self._logs.of(name).event("unload", time.monotonic() - began, before, unloaded, why=worker.told.message)

    # ── by itself ───────────────────────────────────────────────────────────────────────────────

    async def watch(self, name: str, worker: Worker, child: Child) -> None:
        """Wait for the end of a worker that loaded, and report it unless it was told to leave."""
        try:
            error = await child.exited()
        except Exception as fault:  # a model whose end is not seen could never be loaded again
            _log.exception("watching %s failed", name)
            error = WorkerDied(f"model {name!r} was lost sight of: {fault}", model=name)
        if error is None or worker.told is not None:
            return
        began = time.monotonic()
        if worker.announced:
            error = worker.why(name, error)
            await self._over(name, worker, ev.WorkerExited(name, error), error.message, began)
        else:  # it died while it was measured: to those who wait that is a failed load
            failed = LoadFailed(error.message, hint=error.hint, **error.details)
            await self.broke(name, worker, failed, began)

    async def broke(self, name: str, worker: Worker, error: PageinError, began: float) -> None:
        """Report a load or a waking that failed."""
        if worker.told is None:
            error = worker.why(name, error)
            self._logs.of(name).event("load", time.monotonic() - began, failed=error.message.partition("\n")[0])
            await self._over(name, worker, ev.LoadBroke(name, error), error.message, time.monotonic())

    # ── maimed ──────────────────────────────────────────────────────────────────────────────────

    def look_at_cells(self, hard: bool) -> None:
        """End what the kernel maimed, and, where limits are ``hard``, what outgrew its own without a group."""
        for name, worker in self._crew.workers.items():
            if worker.child is None or worker.told is not None or worker.over:
                continue
            error = self._trouble(name, worker, hard)
            if error is not None:
                worker.told = error
                self._crew.spawn(self._end_maimed(name, worker, error))

    def _trouble(self, name: str, worker: Worker, hard: bool) -> PageinError | None:
        """What a look at a worker's memory tells: one that lost a process to the kernel cannot work any more."""
        if worker.cell is not None:
            lost = WorkerDied(f"model {name!r} lost a process to the kernel", model=name)
            return worker.why(name, lost) if worker.cell.oom_kills() else None
        limit = worker.limit(self._roster.settings.supervisor.limit_margin)
        used = self._meter.last(name).get("ram", 0)
        if not hard or limit is None or used <= limit:
            return None  # without groups at all the scheduler watches
        by = "the watchdog, since the kernel refused it a cgroup"
        return Outgrown(name, "ram", worker.allowance["ram"], limit, used, by)

    async def _end_maimed(self, name: str, worker: Worker, error: PageinError) -> None:
        began = time.monotonic()
        await self.end_process(name, worker, 0.0)
        event = ev.WorkerExited(name, error) if worker.announced else ev.LoadBroke(name, error)
        await self._over(name, worker, event, error.message, began)

    # ── afterwards ──────────────────────────────────────────────────────────────────────────────

    async def _over(self, name: str, worker: Worker, event: ev.Event, reason: str, began: float) -> None:
        """The process is gone: say so, then measure that its memory is back, then say that."""
        if worker.over:
            return
        worker.over = True
        before, beside = dict(self._meter.last(name)), dict(self._meter.beside(name))
        self._meter.forget(name)
        if self._keeper is not None:
            self._keeper.forget(name)
        if worker.child is not None:
            self._crew.gone[name] = worker
        self._inbox.post(event)
        left = await self._release(name, Release(name, worker.child, worker.cell, before, beside, self._meter))
        await self._meter.measure_machine()
        self._logs.of(name).event(
            "unload", time.monotonic() - began, before, left or dict.fromkeys(before, 0), why=reason
        )
        if self._crew.workers.get(name) is worker:
            del self._crew.workers[name]
        self._inbox.post(ev.Freed(name, left))

    async def _release(self, name: str, release: Release) -> dict[str, int]:
        """What the model's workers left behind, this one and those before it."""
        try:
            left = await release.until_free(self._roster.settings.supervisor.release_timeout)
        except Exception:  # bytes that are never called free would hold up every load after this one
            _log.exception("looking for what %s left behind failed", name)
            left = {}
        if left:
            self._crew.spawn(release.follow(lambda now: self._left_changed(name, release, now)))
        return self._left.note(name, release, left)

    def _left_changed(self, name: str, release: Release, left: dict[str, int]) -> None:
        self._inbox.post(ev.LeftChanged(name, self._left.note(name, release, left)))

    async def why(self, name: str, endpoint: Endpoint, patience: float) -> PageinError | None:
        """Why the worker behind an endpoint ended; waits a little for the news; None when it lives on."""
        for worker in (self._crew.workers.get(name), self._crew.gone.get(name)):
            if worker is not None and worker.child is not None and worker.child.ready.endpoint == endpoint:
                return await self._why_it_ended(name, worker, worker.child, patience)
        return None

    async def _why_it_ended(self, name: str, worker: Worker, child: Child, patience: float) -> PageinError | None:
        with contextlib.suppress(TimeoutError):
            error = await asyncio.wait_for(child.exited(), patience)
            if error is not None and worker.told is None:
                return worker.why(name, error)
        return worker.told
