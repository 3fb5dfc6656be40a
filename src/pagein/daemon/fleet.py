"""Carries the scheduler's actions out: starts and stops workers, and posts back what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.model import ModelEntry
from pagein.config.schema import Model
from pagein.daemon.inbox import Inbox
from pagein.daemon.meter import Meter
from pagein.daemon.release import Release
from pagein.daemon.roster import Roster
from pagein.daemon.sleeper import SleepFailed, tell_to_sleep, tell_to_wake
from pagein.errors import LoadFailed, PageinError, WorkerDied
from pagein.protocol import Endpoint, Ready, WorkerSpec
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Kill, Load, Sleep, Stop, Wake
from pagein.scheduler.intake import MOST_KEPT
from pagein.supervisor.child import Child
from pagein.supervisor.digest import worker_digest
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.limits import Cell, Limiter, limit_for, outgrown, sacrificed
from pagein.supervisor.log import ModelLog
from pagein.supervisor.registry import Record, Registry
from pagein.supervisor.spare import Spare

_log = logging.getLogger("pagein.fleet")

SLEEP_PAUSE = 0.05
"""Seconds between two measurements of a worker that falls asleep."""


@dataclass(slots=True)
class _Worker:
    """One process of one model, from the order to load until its memory is back."""

    allowance: dict[str, int] = field(default_factory=dict)
    start: asyncio.Task[None] | None = None
    child: Child | None = None
    cell: Cell | None = None
    """Its cgroup, where it has one."""
    announced: bool = False
    """The scheduler knows that it is ready."""
    told: PageinError | None = None
    """Why it was told to leave; None while it was not."""
    over: bool = False
    """Its process is gone and was reported."""


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
    ) -> None:
        self._roster, self._inbox, self._meter = roster, inbox, meter
        self._run_dir, self._spare, self._limiter, self._registry = run_dir, spare, limiter, registry
        self._workers: dict[str, _Worker] = {}
        self._gone: dict[str, _Worker] = {}
        """The last worker of each model that ended, to explain connections that broke with it."""
        self._last_ready: dict[str, Ready] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._logs: dict[str, ModelLog] = {}

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Start and stop what the scheduler decided."""
        for action in actions:
            match action:
                case Load():
                    worker = self._workers[action.model] = _Worker(dict(action.allowance))
                    worker.start = self._spawn(self._start(action, worker))
                case Stop():
                    self._tell(action.model, WorkerDied(action.reason), self._grace)
                case Kill():
                    self._tell(action.model, action.error or WorkerDied(action.reason), 0.0)
                case Sleep() if (there := self._workers.get(action.model)) is not None:
                    self._spawn(self._sleep(action.model, there))
                case Wake() if (there := self._workers.get(action.model)) is not None:
                    there.start, there.announced = self._spawn(self._wake(action, there)), False
        if isinstance(event, ev.Measured):
            self._look_at_cells()

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

    async def _start(self, action: Load, worker: _Worker) -> None:
        if worker.told is not None:
            return  # in the same moment
        name, began, entry = action.model, time.monotonic(), self._roster.entries[action.model]
        spec, environ = self._spec(entry, action.allowance)
        try:
            child = await Child.start(
                spec,
                environ=environ,
                log=self._log_of(name),
                on_spawn=lambda pid: self._confine(name, pid, worker),
                spare=self._spare.take(environ),
                registry=self._registry,
                identity=entry.peak_key,
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

    def _confine(self, name: str, pid: int, worker: _Worker) -> None:
        """It has not read its spec yet, so it has taken nothing: the place for its limit."""
        self._meter.watch(name, pid)
        if self._limiter.hard and "ram" in worker.allowance:
            limit = limit_for(worker.allowance["ram"], self._roster.settings.supervisor.limit_margin)
            worker.cell = self._limiter.confine(name, pid, limit)

    async def _announce(self, name: str, worker: _Worker, reason: str, seconds: float) -> None:
        """It is ready: measure what it took, then say so, unless it left meanwhile."""
        used = await self._meter.measure_load(name)
        if worker.told is not None or worker.over or worker.child is None:
            return
        worker.announced = True
        ready = worker.child.ready
        self._log_of(name).event("load", seconds, dict.fromkeys(used, 0), used, pid=worker.child.pid, why=reason)
        sleeps = ready.sleeps and self._roster.models[name].sleep
        self._inbox.post(ev.BecameReady(name, used, seconds, sleeps))

    async def _broke(self, name: str, worker: _Worker, error: PageinError, began: float) -> None:
        if worker.told is None:
            error = self._why(name, worker, error)
            self._log_of(name).event("load", time.monotonic() - began, failed=error.message.partition("\n")[0])
            await self._over(name, worker, ev.LoadBroke(name, error), error.message, time.monotonic())

    def _why(self, name: str, worker: _Worker, error: PageinError) -> PageinError:
        """The kernel's own word, where it ended the worker for its memory."""
        if worker.cell is None:
            return error
        allowance = worker.allowance.get("ram", 0)
        found = outgrown(name, worker.cell, allowance) or sacrificed(name, worker.cell, allowance)
        if found is None:
            return error
        found.details["log"] = error.details.get("log", [])
        return found

    # ── sleeping ────────────────────────────────────────────────────────────────────────────────

    async def _sleep(self, name: str, worker: _Worker) -> None:
        before, began, timeout = dict(self._meter.last(name)), time.monotonic(), self._roster.settings.supervisor
        if worker.child is None or worker.told is not None:
            return
        try:
            await tell_to_sleep(worker.child.ready.endpoint, timeout.release_timeout)
        except SleepFailed as error:
            self._inbox.post(ev.SleepBroke(name, str(error)))
            return
        used = await self._meter.measure_load(name)
        while not _has_gone_down(before, used) and time.monotonic() - began < timeout.release_timeout:
            await asyncio.sleep(SLEEP_PAUSE)
            used = await self._meter.measure_load(name)
        if worker.told is None and not worker.over:
            self._log_of(name).event("sleep", time.monotonic() - began, before, used)
            self._inbox.post(ev.Slept(name, before, used))

    async def _wake(self, action: Wake, worker: _Worker) -> None:
        name, began = action.model, time.monotonic()
        worker.allowance = dict(action.allowance)
        if worker.child is None or worker.told is not None:
            return
        if worker.cell is not None and "ram" in worker.allowance:
            worker.cell.set_limit(limit_for(worker.allowance["ram"], self._roster.settings.supervisor.limit_margin))
        try:
            await tell_to_wake(worker.child.ready.endpoint, self._roster.settings.supervisor.ready_timeout)
        except SleepFailed as error:
            if worker.told is None and not worker.over:
                await worker.child.kill()
                await self._broke(name, worker, LoadFailed(f"model {name!r} did not wake: {error}"), began)
            return
        await self._announce(name, worker, action.reason, time.monotonic() - began)

    # ── ending ──────────────────────────────────────────────────────────────────────────────────

    async def _watch_exit(self, name: str, worker: _Worker, child: Child) -> None:
        try:
            error = await child.exited()
        except Exception as fault:  # a model whose end is not seen could never be loaded again
            _log.exception("watching %s failed", name)
            error = WorkerDied(f"model {name!r} was lost sight of: {fault}", model=name)
        if error is None or worker.told is not None:
            return
        began = time.monotonic()
        if worker.announced:
            error = self._why(name, worker, error)
            await self._over(name, worker, ev.WorkerExited(name, error), error.message, began)
        else:  # it died while it was measured: to those who wait that is a failed load
            failed = LoadFailed(error.message, hint=error.hint, **error.details)
            await self._broke(name, worker, failed, began)

    def _look_at_cells(self) -> None:
        """The kernel may have ended one process of a worker and left the rest, which cannot work any more."""
        for name, worker in self._workers.items():
            if worker.cell is None or worker.child is None or worker.told is not None or worker.over:
                continue
            if worker.cell.oom_kills():
                error = self._why(name, worker, WorkerDied(f"model {name!r} lost a process to the kernel"))
                worker.told = error
                self._spawn(self._end_maimed(name, worker, error))

    async def _end_maimed(self, name: str, worker: _Worker, error: PageinError) -> None:
        began = time.monotonic()
        await self._end_process(name, worker, 0.0)
        event = ev.WorkerExited(name, error) if worker.announced else ev.LoadBroke(name, error)
        await self._over(name, worker, event, error.message, began)

    async def _end(self, name: str, worker: _Worker, grace: float) -> None:
        began = time.monotonic()
        await self._end_process(name, worker, grace)
        reason = worker.told.message if worker.told is not None else ""
        await self._over(name, worker, ev.Stopped(name), reason, began)

    async def _end_process(self, name: str, worker: _Worker, grace: float) -> None:
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

    async def _over(self, name: str, worker: _Worker, event: ev.Event, reason: str, began: float) -> None:
        """The process is gone: say so, then measure that its memory is back, then say that."""
        if worker.over:
            return
        worker.over = True
        before = dict(self._meter.last(name))
        self._meter.forget(name)
        if worker.child is not None:
            self._gone[name] = worker
        self._inbox.post(event)
        left = await self._release(name, worker, before)
        await self._meter.measure_machine()
        self._log_of(name).event(
            "unload", time.monotonic() - began, before, left or dict.fromkeys(before, 0), why=reason
        )
        if self._workers.get(name) is worker:
            del self._workers[name]
        self._inbox.post(ev.Freed(name, left))

    async def _release(self, name: str, worker: _Worker, before: dict[str, int]) -> dict[str, int]:
        release = Release(name, worker.child, worker.cell, before, self._meter)
        try:
            left = await release.until_free(self._roster.settings.supervisor.release_timeout)
        except Exception:  # bytes that are never called free would hold up every load after this one
            _log.exception("looking for what %s left behind failed", name)
            return {}
        if left:
            self._spawn(release.follow(lambda now: self._inbox.post(ev.LeftChanged(name, now))))
        return left

    # ── adoption ────────────────────────────────────────────────────────────────────────────────

    def digest_of(self, name: str) -> str:
        """What decides the worker that a model would get now."""
        entry = self._roster.entries[name]
        spec, environ = self._spec(entry, {})
        return worker_digest(spec, environ, entry.peak_key)

    async def adopt(self, record: Record, cells: list[Cell]) -> None:
        """Take over a worker that outlived an earlier daemon; one that does not agree has ended then."""
        name, began = str(record.name), time.monotonic()
        assert self._registry is not None
        worker = _Worker(dict(record.allowance))
        worker.cell = next((cell for cell in cells if record.pid in cell.pids()), None)
        try:
            child = worker.child = await Child.adopt(record, log=self._log_of(name), registry=self._registry)
        except PageinError as error:
            _log.warning("%s was not taken over: %s", name, error.message)
            return
        if not await self._is_awake(name, child):
            return
        self._workers[name] = worker
        self._meter.watch(name, child.pid)
        self._last_ready[name] = child.ready
        used = await self._meter.measure_load(name)
        worker.announced = True
        self._log_of(name).event("adopt", time.monotonic() - began, {}, used, pid=child.pid)
        sleeps = child.ready.sleeps and self._roster.models[name].sleep
        self._inbox.post(ev.Adopted(name, dict(record.allowance), used, sleeps))
        self._spawn(self._watch_exit(name, worker, child))

    async def _is_awake(self, name: str, child: Child) -> bool:
        """Wake a worker that may have been sent to sleep by the daemon that was killed; ends it where it does not."""
        if not (child.ready.sleeps and self._roster.models[name].sleep):
            return True
        try:
            await tell_to_wake(child.ready.endpoint, self._roster.settings.supervisor.ready_timeout)
        except SleepFailed as error:
            _log.warning("%s was not taken over: %s", name, error)
            await child.kill()
            return False
        return True

    # ── what a worker is given ──────────────────────────────────────────────────────────────────

    def _spec(self, entry: ModelEntry, allowance: dict[str, int]) -> tuple[WorkerSpec, dict[str, str]]:
        model, supervisor = self._roster.models[entry.name], self._roster.settings.supervisor
        spec = WorkerSpec(
            name=entry.name,
            engine=entry.engine,
            token=secrets.token_hex(16),
            socket_dir=str(self._run_dir),
            path=str(entry.info.path) if entry.info is not None else None,
            command=model.command,
            recipe=entry.recipe,
            context=entry.context,
            parallel=model.parallel_for(entry.engine),
            threads=model.threads,
            cpus=model.cpus,
            device=entry.device,
            allowance=allowance,
            ready_timeout=supervisor.ready_timeout,
            options=_options(entry, model),
        )
        return spec, worker_environment(spec, model.env)

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

    def _log_of(self, name: str) -> ModelLog:
        if name not in self._logs:
            supervisor = self._roster.settings.supervisor
            self._logs[name] = ModelLog(self.log_path(name), supervisor.log_bytes, supervisor.log_files)
        return self._logs[name]

    def log_path(self, name: str) -> Path:
        """Where the model's log is."""
        return self._roster.settings.state_dir / "logs" / f"{name}.log"

    def last_lines(self, name: str) -> list[str]:
        """The last lines that the newest worker of a model printed."""
        return self._log_of(name).tail()

    def log_use(self, name: str, request_id: int, status: int, seconds: float) -> None:
        """Write the log line of one inference (row G13)."""
        before, after = self._meter.since_last_use(name)
        self._log_of(name).event("infer", seconds, before, after, request=request_id, status=status)

    async def why_ended(self, name: str, endpoint: Endpoint, patience: float) -> PageinError | None:
        """Why the worker behind an endpoint ended; waits a little for the news; None when it lives on."""
        for worker in (self._workers.get(name), self._gone.get(name)):
            if worker is not None and worker.child is not None and worker.child.ready.endpoint == endpoint:
                return await self._why_it_ended(name, worker, worker.child, patience)
        return None

    async def _why_it_ended(self, name: str, worker: _Worker, child: Child, patience: float) -> PageinError | None:
        with contextlib.suppress(TimeoutError):
            error = await asyncio.wait_for(child.exited(), patience)
            if error is not None and worker.told is None:
                return self._why(name, worker, error)
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
        for log in self._logs.values():
            log.close()

    async def kill_all(self) -> None:
        """Do not wait for the grace of those that `stop_all` is ending."""
        await asyncio.gather(*(self._end_process(name, worker, 0.0) for name, worker in list(self._workers.items())))

    async def _shut(self, name: str, worker: _Worker, grace: float) -> None:
        began, before = time.monotonic(), dict(self._meter.last(name))
        worker.told = worker.told or WorkerDied("the daemon stops")
        await self._end_process(name, worker, grace)
        if worker.cell is not None:
            await asyncio.to_thread(worker.cell.kill)
            await asyncio.to_thread(worker.cell.remove)
        if not worker.over:
            worker.over = True
            unloaded = dict.fromkeys(before, 0)
            self._log_of(name).event("unload", time.monotonic() - began, before, unloaded, why=worker.told.message)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a task of the fleet failed", exc_info=fault)


def _has_gone_down(before: dict[str, int], used: dict[str, int]) -> bool:
    return all(used.get(pool, 0) <= count * MOST_KEPT for pool, count in before.items())


def _options(entry: ModelEntry, model: Model) -> dict[str, object]:
    """The engine's options; a command is also told what its server offers, and whether it sleeps."""
    options = dict(entry.options)
    if entry.engine == "command" and model.capabilities is not None:
        options["capabilities"] = list(model.capabilities)
    if entry.engine == "command" and model.sleep:
        options["sleep"] = True
    return options
