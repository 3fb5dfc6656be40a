"""Carries the scheduler's actions out: starts and stops workers, and posts back what became of them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path

from pagein.catalog.model import ModelEntry
from pagein.config.schema import Model, Settings
from pagein.daemon.inbox import Inbox
from pagein.daemon.meter import Meter
from pagein.errors import LoadFailed, PageinError, WorkerDied
from pagein.protocol import Endpoint, Ready, WorkerSpec
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Kill, Load, Stop
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.log import ModelLog
from pagein.supervisor.spare import Spare

_log = logging.getLogger("pagein.fleet")

SURVIVOR_PAUSE = 0.05
"""Seconds between looks at processes that were killed and are not gone yet; grows to `SURVIVOR_PAUSE_MAX`."""
SURVIVOR_PAUSE_MAX = 1.0


@dataclass(slots=True)
class _Worker:
    """One process of one model, from the order to load until its memory is back."""

    start: asyncio.Task[None] | None = None
    child: Child | None = None
    announced: bool = False
    """The scheduler knows that it is ready."""
    told: str | None = None
    """Why it was told to leave; None while it was not."""
    over: bool = False
    """Its process is gone and was reported."""


class Fleet:
    """The workers; a listener of the inbox. At most one process per model at any time."""

    def __init__(
        self,
        settings: Settings,
        entries: dict[str, ModelEntry],
        inbox: Inbox,
        meter: Meter,
        run_dir: Path,
        spare: Spare,
    ) -> None:
        self._settings, self._entries, self._inbox, self._meter = settings, entries, inbox, meter
        self._run_dir, self._spare = run_dir, spare
        self._workers: dict[str, _Worker] = {}
        self._gone: dict[str, _Worker] = {}
        """The last worker of each model that ended, to explain connections that broke with it."""
        self._last_ready: dict[str, Ready] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        sup = settings.supervisor
        log_dir = settings.state_dir / "logs"
        self._logs = {name: ModelLog(log_dir / f"{name}.log", sup.log_bytes, sup.log_files) for name in entries}

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Start and stop what the scheduler decided."""
        for action in actions:
            match action:
                case Load():
                    worker = self._workers[action.model] = _Worker()
                    worker.start = self._spawn(self._start(action, worker))
                case Stop() | Kill():
                    self._tell(action)

    def _tell(self, action: Stop | Kill) -> None:
        worker = self._workers.get(action.model)
        if worker is None or worker.over:
            return  # it ended by itself a moment ago, and was reported
        worker.told = action.reason
        grace = 0.0 if isinstance(action, Kill) else self._settings.supervisor.grace
        self._spawn(self._end(action.model, worker, grace))

    async def _start(self, action: Load, worker: _Worker) -> None:
        if worker.told is not None:
            return  # in the same moment
        name, began = action.model, time.monotonic()
        spec, log = self._spec(self._entries[name], action.allowance), self._logs[name]
        environ = worker_environment(spec, self._settings.models[name].env)
        try:
            child = await Child.start(
                spec,
                environ=environ,
                log=log,
                on_spawn=lambda pid: self._meter.watch(name, pid),
                spare=self._spare.take(environ),
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
        await self._announce(action, worker, child, time.monotonic() - began)

    async def _announce(self, action: Load, worker: _Worker, child: Child, seconds: float) -> None:
        """It is ready: watch it, measure what it took, then say so, unless it left meanwhile."""
        name = action.model
        worker.child = child
        self._last_ready[name] = child.ready
        self._spawn(self._watch_exit(name, worker, child))
        used = await self._meter.measure_load(name)
        if worker.told is not None or worker.over:
            return
        worker.announced = True
        self._logs[name].event("load", seconds, dict.fromkeys(used, 0), used, pid=child.pid, why=action.reason)
        self._inbox.post(ev.BecameReady(name, used, seconds))

    async def _broke(self, name: str, worker: _Worker, error: PageinError, began: float) -> None:
        if worker.told is None:
            self._logs[name].event("load", time.monotonic() - began, failed=error.message.partition("\n")[0])
            await self._over(name, worker, ev.LoadBroke(name, error), error.message, time.monotonic())

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
            await self._over(name, worker, ev.WorkerExited(name, error), error.message, began)
        else:  # it died while it was measured: to those who wait that is a failed load
            failed = LoadFailed(error.message, hint=error.hint, **error.details)
            await self._broke(name, worker, failed, began)

    async def _end(self, name: str, worker: _Worker, grace: float) -> None:
        began = time.monotonic()
        await self._end_process(name, worker, grace)
        await self._over(name, worker, ev.Stopped(name), worker.told or "", began)

    async def _end_process(self, name: str, worker: _Worker, grace: float) -> None:
        """End the tree of a worker that was told to leave; may be called again with less grace meanwhile."""
        try:
            if worker.child is None and worker.start is not None:
                if not worker.start.cancelling():  # a second cancellation would not wait for the end of the tree
                    worker.start.cancel()
                await asyncio.wait([worker.start])
            if worker.child is not None:
                await (worker.child.stop(grace) if grace > 0 else worker.child.kill())
        except Exception:  # `_end_survivors` looks at what is left
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
        await self._end_survivors(name, worker)
        await self._meter.measure_machine()
        self._log_unload(name, began, before, reason)
        if self._workers.get(name) is worker:
            del self._workers[name]
        self._inbox.post(ev.Freed(name))

    async def _end_survivors(self, name: str, worker: _Worker) -> None:
        """Bytes stay `releasing` while anything of the tree lives."""
        pause = SURVIVOR_PAUSE
        try:
            while worker.child is not None and (left := await worker.child.pids()):
                _log.warning("%s left processes %s behind; ending them", name, left)
                await worker.child.kill()
                await asyncio.sleep(pause)
                pause = min(SURVIVOR_PAUSE_MAX, pause * 2)
        except Exception:  # bytes that are never called free would hold up every load after this one
            _log.exception("looking for what %s left behind failed", name)

    def _log_unload(self, name: str, began: float, before: dict[str, int], why: str) -> None:
        self._logs[name].event("unload", time.monotonic() - began, before, dict.fromkeys(before, 0), why=why)

    def _spec(self, entry: ModelEntry, allowance: dict[str, int]) -> WorkerSpec:
        model = self._settings.models[entry.name]
        return WorkerSpec(
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
            ready_timeout=self._settings.supervisor.ready_timeout,
            options=_options(entry, model),
        )

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
        return self._logs[name].path

    def log_use(self, name: str, request_id: int, status: int, seconds: float) -> None:
        """Write the log line of one inference (row G13)."""
        before, after = self._meter.since_last_use(name)
        self._logs[name].event("infer", seconds, before, after, request=request_id, status=status)

    async def why_ended(self, name: str, endpoint: Endpoint, patience: float) -> PageinError | None:
        """Why the worker behind an endpoint ended; waits a little for the news; None when it lives on."""
        for worker in (self._workers.get(name), self._gone.get(name)):
            if worker is not None and worker.child is not None and worker.child.ready.endpoint == endpoint:
                return await self._why_it_ended(worker, worker.child, patience)
        return None

    async def _why_it_ended(self, worker: _Worker, child: Child, patience: float) -> PageinError | None:
        with contextlib.suppress(TimeoutError):
            error = await asyncio.wait_for(child.exited(), patience)
            if error is not None:
                return error
        return WorkerDied(worker.told) if worker.told is not None else None

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
        worker.told = worker.told or "the daemon stops"
        await self._end_process(name, worker, grace)
        if not worker.over:
            worker.over = True
            self._log_unload(name, began, before, worker.told)

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("a task of the fleet failed", exc_info=fault)


def _options(entry: ModelEntry, model: Model) -> dict[str, object]:
    """The engine's options; a command is also told what its server offers."""
    options = dict(entry.options)
    if entry.engine == "command" and model.capabilities is not None:
        options["capabilities"] = list(model.capabilities)
    return options
