"""Carries the scheduler's actions out: starts and stops workers, and posts back what became of them."""

from __future__ import annotations

import asyncio
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
from pagein.errors import LoadFailed, PageinError
from pagein.protocol import Endpoint, Ready, WorkerSpec
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Kill, Load, Stop
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.log import ModelLog

_log = logging.getLogger("pagein.fleet")

SURVIVOR_PAUSE = 0.05
"""Seconds between looks at processes that were killed and are not gone yet; grows to `SURVIVOR_PAUSE_MAX`."""
SURVIVOR_PAUSE_MAX = 1.0


@dataclass(slots=True)
class _Worker:
    """One process of one model, from the order to load until its memory is back."""

    start: asyncio.Task[None] | None = None
    child: Child | None = None
    exit_watch: asyncio.Task[None] | None = None
    asked: bool = False
    """It was told to leave."""
    over: bool = False
    """Its process is gone and was reported."""


class Fleet:
    """The workers; a listener of the inbox. At most one process per model at any time."""

    def __init__(
        self, settings: Settings, entries: dict[str, ModelEntry], inbox: Inbox, meter: Meter, run_dir: Path
    ) -> None:
        self._settings, self._entries, self._inbox, self._meter = settings, entries, inbox, meter
        self._run_dir = run_dir
        self._workers: dict[str, _Worker] = {}
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
                    self._spawn(self._end(action))

    async def _start(self, action: Load, worker: _Worker) -> None:
        name, began = action.model, time.monotonic()
        spec, log = self._spec(self._entries[name], action.allowance), self._logs[name]
        try:
            child = await Child.start(
                spec,
                environ=worker_environment(spec, self._settings.models[name].env),
                log=log,
                on_spawn=lambda pid: self._meter.watch(name, pid),
            )
        except PageinError as error:
            await self._broke(name, worker, error)
            return
        except Exception as error:  # the daemon outlives every fault of a start
            _log.exception("starting %s failed", name)
            await self._broke(name, worker, LoadFailed(f"starting {name!r} failed: {error}"))
            return
        seconds = time.monotonic() - began
        worker.child = child
        self._last_ready[name] = child.ready
        used = await self._meter.measure_load(name)
        if worker.asked:
            return
        log.event("load", seconds, after=used, pid=child.pid, why=action.reason)
        worker.exit_watch = self._spawn(self._watch_exit(name, worker, child))
        self._inbox.post(ev.BecameReady(name, used, seconds))

    async def _broke(self, name: str, worker: _Worker, error: PageinError) -> None:
        if not worker.asked:
            await self._over(name, worker, ev.LoadBroke(name, error), error.message)

    async def _watch_exit(self, name: str, worker: _Worker, child: Child) -> None:
        error = await child.exited()
        if error is not None and not worker.asked:
            await self._over(name, worker, ev.WorkerExited(name, error), error.message)

    async def _end(self, action: Stop | Kill) -> None:
        worker = self._workers.get(action.model)
        if worker is None or worker.over:
            return  # it ended by itself a moment ago, and was reported
        worker.asked = True
        await self._end_process(worker, 0.0 if isinstance(action, Kill) else self._settings.supervisor.grace)
        await self._over(action.model, worker, ev.Stopped(action.model), action.reason)

    async def _end_process(self, worker: _Worker, grace: float) -> None:
        if worker.child is None and worker.start is not None:
            worker.start.cancel()  # ends the tree of a worker that is not ready yet
            await asyncio.wait([worker.start])
        if worker.child is not None:
            await (worker.child.stop(grace) if grace > 0 else worker.child.kill())

    async def _over(self, name: str, worker: _Worker, event: ev.Event, reason: str) -> None:
        """The process is gone: say so, then measure that its memory is back, then say that."""
        if worker.over:
            return
        worker.over = True
        before, began = dict(self._meter.last(name)), time.monotonic()
        self._meter.forget(name)
        self._inbox.post(event)
        await self._end_survivors(name, worker)
        await self._meter.measure_machine()
        self._logs[name].event("unload", time.monotonic() - began, before, why=reason)
        if self._workers.get(name) is worker:
            del self._workers[name]
        self._inbox.post(ev.Freed(name))

    async def _end_survivors(self, name: str, worker: _Worker) -> None:
        """Bytes stay `releasing` while anything of the tree lives."""
        pause = SURVIVOR_PAUSE
        while worker.child is not None and (left := await worker.child.pids()):
            _log.warning("%s left processes %s behind; ending them", name, left)
            await worker.child.kill()
            await asyncio.sleep(pause)
            pause = min(SURVIVOR_PAUSE_MAX, pause * 2)

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
        worker = self._workers.get(name)
        return worker.child.ready if worker is not None and worker.child is not None else None

    def last_ready(self, name: str) -> Ready | None:
        """What the newest worker of a model said, also after it went."""
        return self._last_ready.get(name)

    def pid(self, name: str) -> int | None:
        """The live worker's process, None when there is none."""
        worker = self._workers.get(name)
        return worker.child.pid if worker is not None and worker.child is not None else None

    def log_path(self, name: str) -> Path:
        """Where the model's log is."""
        return self._logs[name].path

    def log_use(self, name: str, request_id: int, status: int, seconds: float) -> None:
        """Write the log line of one inference (row G13)."""
        before, after = self._meter.since_last_use(name)
        self._logs[name].event("infer", seconds, before, after, request=request_id, status=status)

    async def why_ended(self, name: str, endpoint: Endpoint, patience: float) -> PageinError | None:
        """Why the worker behind an endpoint ended; waits a little for the news; None when it lives on."""
        worker = self._workers.get(name)
        if worker is None or worker.child is None or worker.child.ready.endpoint != endpoint:
            return None
        try:
            return await asyncio.wait_for(asyncio.shield(worker.child.exited()), patience)
        except TimeoutError:
            return None

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    async def stop_all(self, grace: float) -> None:
        """End every worker at once (shutdown); returns when all are gone."""
        await asyncio.gather(*(self._shut(name, worker, grace) for name, worker in list(self._workers.items())))
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for log in self._logs.values():
            log.close()

    async def _shut(self, name: str, worker: _Worker, grace: float) -> None:
        began, before = time.monotonic(), dict(self._meter.last(name))
        worker.asked = True
        await self._end_process(worker, grace)
        if not worker.over:
            self._logs[name].event("unload", time.monotonic() - began, before, why="the daemon stops")

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _options(entry: ModelEntry, model: Model) -> dict[str, object]:
    """The engine's options; a command is also told what its server offers."""
    options = dict(entry.options)
    if entry.engine == "command" and model.capabilities is not None:
        options["capabilities"] = list(model.capabilities)
    return options
