"""Carries the scheduler's actions out: starts and stops workers, and posts back what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Coroutine
from pathlib import Path

from pagein.daemon.adoption import take_over
from pagein.daemon.inbox import Inbox
from pagein.daemon.keeper import Keeper
from pagein.daemon.logs import ModelLogs
from pagein.daemon.meter import Meter
from pagein.daemon.release import Leftovers, Release
from pagein.daemon.resizer import resize
from pagein.daemon.roster import Roster
from pagein.daemon.sleeper import SleepFailed, put_to_sleep, tell_to_wake
from pagein.daemon.specs import Specs
from pagein.daemon.worker import Worker
from pagein.errors import LoadFailed, Outgrown, PageinError, WorkerDied
from pagein.protocol import Endpoint, Ready
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Kill, Load, Renewed, Resize, Sleep, Stop, Wake
from pagein.supervisor.child import Child
from pagein.supervisor.limits import Cell, Limiter, limit_for
from pagein.supervisor.registry import Record, Registry
from pagein.supervisor.spare import Spare

_log = logging.getLogger("pagein.fleet")


class Fleet:
    """The workers; a listener of the inbox. At most one process per model at any time."""

    def __init__(
        self,
        roster: Roster,
        inbox: Inbox,
        meter: Meter,
        run_dir: Path,
        spare: Spare,
        limiter: Limiter,
        registry: Registry | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._roster, self._inbox, self._meter = roster, inbox, meter
        self._spare, self._limiter, self._registry = spare, limiter, registry
        self._keeper = keeper
        self._workers: dict[str, Worker] = {}
        self._gone: dict[str, Worker] = {}
        """The last worker of each model that ended, to explain connections that broke with it."""
        self._last_ready: dict[str, Ready] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs, self._specs, self._left = (
            ModelLogs(roster),
            Specs(roster, run_dir, keeper.slots if keeper is not None else None),
            Leftovers(),
        )

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Start and stop what the scheduler decided."""
        for action in actions:
            match action:
                case Load():
                    worker = self._workers[action.model] = Worker(dict(action.allowance))
                    worker.start = self._spawn(self._start(action, worker))
                case Stop():
                    self._tell(action.model, WorkerDied(action.reason), self._grace)
                case Kill():
                    self._tell(action.model, action.error or WorkerDied(action.reason), 0.0)
                case Sleep() if (there := self._workers.get(action.model)) is not None:
                    self._spawn(self._sleep(action.model, there))
                case Wake() if (there := self._workers.get(action.model)) is not None:
                    there.start, there.announced = self._spawn(self._wake(action, there)), False
                case Resize() if (there := self._workers.get(action.model)) is not None:
                    self._spawn(self._resize(action, there))
                case Renewed():
                    self._forget(action)
        if isinstance(event, ev.Measured):
            self._look_at_cells()

    def _forget(self, action: Renewed) -> None:
        """What its last worker said is not what the model is now."""
        self._last_ready.pop(action.model, None)
        if action.removed:
            self._gone.pop(action.model, None)
            self._logs.forget(action.model)

    @property
    def _grace(self) -> float:
        return self._roster.settings.supervisor.grace

    def _tell(self, name: str, why: PageinError, grace: float) -> None:
        worker = self._workers.get(name)
        if worker is None or worker.over:
            return  # it ended by itself a moment ago, and was reported
        worker.told = why
        self._spawn(self._end(name, worker, grace))

    # ── loading ─────────────────────────────────────────────────────────────────────────────────

    async def _start(self, action: Load, worker: Worker) -> None:
        if worker.told is not None:
            return  # in the same moment
        name, began = action.model, time.monotonic()
        if self._keeper is not None:
            self._keeper.expect(self._roster.entries[name])
        try:
            spec, environ = self._specs.of(name, action.allowance)
            child = await Child.start(
                spec,
                environ=environ,
                log=self._logs.of(name),
                on_spawn=lambda pid: self._confine(name, pid, worker),
                spare=self._spare.take(environ),
                registry=self._registry,
                identity=self._roster.entries[name].peak_key,
            )
        except PageinError as error:
            await self._broke(name, worker, error, began)
            return
        except Exception as error:  # the daemon outlives every fault of a start
            _log.exception("starting %s failed", name)
            await self._broke(name, worker, LoadFailed(f"starting {name!r} failed: {error}"), began)
            return
        finally:
            self._spare.refill()  # not before: it would take time from the load
        worker.child = child
        self._last_ready[name] = child.ready
        self._spawn(self._watch_exit(name, worker, child))
        await self._announce(name, worker, action.reason, time.monotonic() - began)

    def _confine(self, name: str, pid: int, worker: Worker) -> None:
        """It has not read its spec yet, so it has taken nothing: the place for its limit."""
        self._meter.watch(name, pid)
        limit = self._limit_of(worker)
        if self._limiter.hard and limit is not None:
            worker.cell = self._limiter.confine(name, pid, limit)

    def _limit_of(self, worker: Worker) -> int | None:
        """Bytes of RAM at which a worker is ended; None for one that was granted none."""
        allowance = worker.allowance.get("ram")
        margin = self._roster.settings.supervisor.limit_margin
        return None if allowance is None else limit_for(allowance, margin)

    async def _announce(self, name: str, worker: Worker, reason: str, seconds: float) -> None:
        """It is ready: measure what it took, then say so, unless it left meanwhile."""
        used = await self._meter.measure_load(name)
        if worker.told is not None or worker.over or worker.child is None:
            return
        worker.announced = True
        ready = worker.child.ready
        self._logs.of(name).event("load", seconds, dict.fromkeys(used, 0), used, pid=worker.child.pid, why=reason)
        sleeps = ready.sleeps and self._roster.models[name].sleep
        if self._keeper is not None:
            self._keeper.begin(self._roster.entries[name], ready)
        self._inbox.post(ev.BecameReady(name, used, seconds, sleeps))

    async def _broke(self, name: str, worker: Worker, error: PageinError, began: float) -> None:
        if worker.told is None:
            error = worker.why(name, error)
            self._logs.of(name).event("load", time.monotonic() - began, failed=error.message.partition("\n")[0])
            await self._over(name, worker, ev.LoadBroke(name, error), error.message, time.monotonic())

    # ── sleeping ────────────────────────────────────────────────────────────────────────────────

    async def _sleep(self, name: str, worker: Worker) -> None:
        if worker.child is None or worker.told is not None:
            return
        began, timeout = time.monotonic(), self._roster.settings.supervisor.release_timeout
        try:
            before, used = await put_to_sleep(name, worker.child.ready.endpoint, self._meter, timeout)
            event: ev.Event = ev.Slept(name, before, used)
        except SleepFailed as error:
            event = ev.SleepBroke(name, str(error))
        except Exception as fault:  # one that never ends would hold up every unload after it
            _log.exception("sending %s to sleep failed", name)
            event = ev.SleepBroke(name, str(fault))
        if worker.told is not None or worker.over:
            return  # it left meanwhile, and that was reported
        if isinstance(event, ev.Slept):
            self._logs.of(name).event("sleep", time.monotonic() - began, event.before, event.used)
        self._inbox.post(event)

    async def _wake(self, action: Wake, worker: Worker) -> None:
        name, began = action.model, time.monotonic()
        worker.allowance = dict(action.allowance)
        if worker.child is None or worker.told is not None:
            return
        limit = self._limit_of(worker)
        if worker.cell is not None and limit is not None:
            worker.cell.set_limit(limit)
        try:
            await tell_to_wake(worker.child.ready.endpoint, self._roster.settings.supervisor.ready_timeout)
        except Exception as error:
            if not isinstance(error, SleepFailed):
                _log.exception("waking %s failed", name)
            if worker.told is None and not worker.over:
                await worker.child.kill()
                await self._broke(name, worker, LoadFailed(f"model {name!r} did not wake: {error}"), began)
            return
        await self._announce(name, worker, action.reason, time.monotonic() - began)

    async def _resize(self, action: Resize, worker: Worker) -> None:
        timeout = self._roster.settings.supervisor.ready_timeout
        error = await resize(action, worker, self._limit_of, self._meter, timeout)
        self._inbox.post(ev.Resized(action.model, action.allowance, error))

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    async def _watch_exit(self, name: str, worker: Worker, child: Child) -> None:
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
            await self._broke(name, worker, failed, began)

    def _look_at_cells(self) -> None:
        """End what the kernel maimed, and what outgrew its allowance without a group of its own."""
        for name, worker in self._workers.items():
            if worker.child is None or worker.told is not None or worker.over:
                continue
            error = self._trouble(name, worker)
            if error is not None:
                worker.told = error
                self._spawn(self._end_maimed(name, worker, error))

    def _trouble(self, name: str, worker: Worker) -> PageinError | None:
        """What a look at a worker's memory tells: one that lost a process to the kernel cannot work any more."""
        if worker.cell is not None:
            lost = WorkerDied(f"model {name!r} lost a process to the kernel", model=name)
            return worker.why(name, lost) if worker.cell.oom_kills() else None
        limit, used = self._limit_of(worker), self._meter.last(name).get("ram", 0)
        if not self._limiter.hard or limit is None or used <= limit:
            return None  # without groups at all the scheduler watches
        by = "the watchdog, since the kernel refused it a cgroup"
        return Outgrown(name, "ram", worker.allowance["ram"], limit, used, by)

    async def _end_maimed(self, name: str, worker: Worker, error: PageinError) -> None:
        began = time.monotonic()
        await self._end_process(name, worker, 0.0)
        event = ev.WorkerExited(name, error) if worker.announced else ev.LoadBroke(name, error)
        await self._over(name, worker, event, error.message, began)

    async def _end(self, name: str, worker: Worker, grace: float) -> None:
        began = time.monotonic()
        if self._keeper is not None and grace > 0 and worker.announced:
            await self._keeper.end(name)
        await self._end_process(name, worker, grace)
        reason = worker.told.message if worker.told is not None else ""
        await self._over(name, worker, ev.Stopped(name), reason, began)

    async def _end_process(self, name: str, worker: Worker, grace: float) -> None:
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
            self._gone[name] = worker
        self._inbox.post(event)
        left = await self._release(name, Release(name, worker.child, worker.cell, before, beside, self._meter))
        await self._meter.measure_machine()
        self._logs.of(name).event(
            "unload", time.monotonic() - began, before, left or dict.fromkeys(before, 0), why=reason
        )
        if self._workers.get(name) is worker:
            del self._workers[name]
        self._inbox.post(ev.Freed(name, left))

    async def _release(self, name: str, release: Release) -> dict[str, int]:
        """What the model's workers left behind, this one and those before it."""
        try:
            left = await release.until_free(self._roster.settings.supervisor.release_timeout)
        except Exception:  # bytes that are never called free would hold up every load after this one
            _log.exception("looking for what %s left behind failed", name)
            left = {}
        if left:
            self._spawn(release.follow(lambda now: self._left_changed(name, release, now)))
        return self._left.note(name, release, left)

    def _left_changed(self, name: str, release: Release, left: dict[str, int]) -> None:
        self._inbox.post(ev.LeftChanged(name, self._left.note(name, release, left)))

    # ── adoption ────────────────────────────────────────────────────────────────────────────────

    def digest_of(self, name: str) -> str:
        """What decides the worker that a model would get now."""
        return self._specs.digest(name)

    async def adopt(self, record: Record, cells: list[Cell]) -> None:
        """Take over a worker that outlived an earlier daemon; one that does not agree has ended then."""
        name, began = str(record.name), time.monotonic()
        assert self._registry is not None
        worker = Worker(dict(record.allowance))
        worker.cell = next((cell for cell in cells if record.pid in cell.pids()), None)
        may_sleep, timeout = self._roster.models[name].sleep, self._roster.settings.supervisor.ready_timeout
        child = worker.child = await take_over(record, self._logs.of(name), self._registry, may_sleep, timeout)
        if child is None:
            return
        self._workers[name] = worker
        self._meter.watch(name, child.pid)
        self._last_ready[name] = child.ready
        used = await self._meter.measure_load(name)
        worker.announced = True
        self._logs.of(name).event("adopt", time.monotonic() - began, {}, used, pid=child.pid)
        if self._keeper is not None:
            self._keeper.begin(self._roster.entries[name], child.ready)
        self._inbox.post(ev.Adopted(name, dict(record.allowance), used, child.ready.sleeps and may_sleep))
        self._spawn(self._watch_exit(name, worker, child))

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def ready(self, name: str) -> Ready | None:
        """What the live worker of a model said when it was ready, None when there is none."""
        child = self._live(name)
        return child.ready if child is not None else None

    def last_ready(self, name: str) -> Ready | None:
        """What the newest worker of a model said, also after it went."""
        return self._last_ready.get(name)

    def pid(self, name: str) -> int | None:
        """The live worker's process, None when there is none."""
        child = self._live(name)
        return child.pid if child is not None else None

    def _live(self, name: str) -> Child | None:
        worker = self._workers.get(name)
        return worker.child if worker is not None and not worker.over else None

    def log_path(self, name: str) -> Path:
        """Where the model's log is."""
        return self._logs.path(name)

    def last_lines(self, name: str) -> list[str]:
        """The last lines that the newest worker of a model printed."""
        return self._logs.of(name).tail()

    def log_use(self, name: str, request_id: int, status: int, seconds: float) -> None:
        """Write the log line of one inference (row G13)."""
        if name not in self._roster.entries:
            return  # it went from the configuration under its last request
        before, after = self._meter.since_last_use(name)
        self._logs.of(name).event("infer", seconds, before, after, request=request_id, status=status)

    async def why_ended(self, name: str, endpoint: Endpoint, patience: float) -> PageinError | None:
        """Why the worker behind an endpoint ended; waits a little for the news; None when it lives on."""
        for worker in (self._workers.get(name), self._gone.get(name)):
            if worker is not None and worker.child is not None and worker.child.ready.endpoint == endpoint:
                return await self._why_it_ended(name, worker, worker.child, patience)
        return None

    async def _why_it_ended(self, name: str, worker: Worker, child: Child, patience: float) -> PageinError | None:
        with contextlib.suppress(TimeoutError):
            error = await asyncio.wait_for(child.exited(), patience)
            if error is not None and worker.told is None:
                return worker.why(name, error)
        return worker.told

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    async def stop_all(self, grace: float) -> None:
        """End every worker at once (shutdown); returns when all are gone."""
        ends = [self._shut(name, worker, grace) for name, worker in self._workers.items()]
        await asyncio.gather(self._spare.close(), *ends)  # that first: a load that is ended here needs no next one
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self._logs.close()

    async def kill_all(self) -> None:
        """Do not wait for the grace of those that `stop_all` is ending."""
        await asyncio.gather(*(self._end_process(name, worker, 0.0) for name, worker in list(self._workers.items())))

    async def _shut(self, name: str, worker: Worker, grace: float) -> None:
        began, before = time.monotonic(), dict(self._meter.last(name))
        worker.told = worker.told or WorkerDied("the daemon stops")
        if self._keeper is not None and grace > 0 and worker.announced:
            await self._keeper.end(name)
        await self._end_process(name, worker, grace)
        if worker.cell is not None:
            await asyncio.to_thread(worker.cell.kill)
            await asyncio.to_thread(worker.cell.remove)
        if not worker.over:
            worker.over = True
            unloaded = dict.fromkeys(before, 0)
            self._logs.of(name).event("unload", time.monotonic() - began, before, unloaded, why=worker.told.message)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a task of the fleet failed", exc_info=fault)
