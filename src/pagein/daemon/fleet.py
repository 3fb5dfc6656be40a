"""Carries the scheduler's actions out: starts and stops workers, and posts back what became of them."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from pagein.daemon.adoption import take_over
from pagein.daemon.crew import Crew
from pagein.daemon.endings import Endings
from pagein.daemon.inbox import Inbox
from pagein.daemon.keeper import Keeper
from pagein.daemon.logs import ModelLogs
from pagein.daemon.meter import Meter
from pagein.daemon.resizer import resize
from pagein.daemon.rollouts import Rollouts
from pagein.daemon.roster import Roster
from pagein.daemon.sleeper import SleepFailed, put_to_sleep, tell_to_wake
from pagein.daemon.specs import Specs
from pagein.daemon.worker import Worker
from pagein.errors import LoadFailed, PageinError, WorkerDied
from pagein.protocol import Endpoint, Ready
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Kill, Load, Renewed, Resize, Sleep, Stop, Wake
from pagein.supervisor.child import Child
from pagein.supervisor.limits import Cell, Limiter
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
        rollouts: Rollouts | None = None,
    ) -> None:
        self._roster, self._inbox, self._meter = roster, inbox, meter
        self._spare, self._limiter, self._registry = spare, limiter, registry
        self._keeper = keeper
        self._crew, self._logs = Crew(), ModelLogs(roster)
        self._specs = Specs(roster, run_dir, keeper, rollouts)
        self._endings = Endings(self._crew, roster, inbox, meter, self._logs, keeper)

    # ── actions ─────────────────────────────────────────────────────────────────────────────────

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Start and stop what the scheduler decided."""
        for action in actions:
            match action:
                case Load():
                    worker = self._crew.workers[action.model] = Worker(dict(action.allowance))
                    worker.start = self._crew.spawn(self._start(action, worker))
                case Stop():
                    grace = self._roster.settings.supervisor.grace
                    self._endings.tell(action.model, WorkerDied(action.reason), grace)
                case Kill():
                    self._endings.tell(action.model, action.error or WorkerDied(action.reason), 0.0)
                case Sleep() if (there := self._crew.workers.get(action.model)) is not None:
                    self._crew.spawn(self._sleep(action.model, there))
                case Wake() if (there := self._crew.workers.get(action.model)) is not None:
                    there.start, there.announced = self._crew.spawn(self._wake(action, there)), False
                case Resize() if (there := self._crew.workers.get(action.model)) is not None:
                    self._crew.spawn(self._resize(action, there))
                case Renewed():
                    self._forget(action)
        if isinstance(event, ev.Measured):
            self._endings.look_at_cells(self._limiter.hard)

    def _forget(self, action: Renewed) -> None:
        """What its last worker said is not what the model is now, unless that goes on."""
        if action.lives:
            return
        self._crew.last_ready.pop(action.model, None)
        if action.removed:
            self._crew.gone.pop(action.model, None)
            self._logs.forget(action.model)

    @property
    def _margin(self) -> int | float:
        return self._roster.settings.supervisor.limit_margin

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
                self._specs.with_rollout(spec),
                configured=spec,
                environ=environ,
                log=self._logs.of(name),
                on_spawn=lambda pid: self._confine(name, pid, worker),
                spare=self._spare.take(environ),
                registry=self._registry,
                identity=self._roster.entries[name].peak_key,
            )
        except PageinError as error:
            await self._endings.broke(name, worker, error, began)
            return
        except Exception as error:  # the daemon outlives every fault of a start
            _log.exception("starting %s failed", name)
            await self._endings.broke(name, worker, LoadFailed(f"starting {name!r} failed: {error}"), began)
            return
        finally:
            self._spare.refill()  # not before: it would take time from the load
        worker.child = child
        self._crew.last_ready[name] = child.ready
        self._crew.spawn(self._endings.watch(name, worker, child))
        await self._announce(name, worker, action.reason, time.monotonic() - began)

    def _confine(self, name: str, pid: int, worker: Worker) -> None:
        """It has not read its spec yet, so it has taken nothing: the place for its limit."""
        self._meter.watch(name, pid)
        limit = worker.limit(self._margin)
        if self._limiter.hard and limit is not None:
            worker.cell = self._limiter.confine(name, pid, limit)

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
        limit = worker.limit(self._margin)
        if worker.cell is not None and limit is not None:
            worker.cell.set_limit(limit)
        try:
            await tell_to_wake(worker.child.ready.endpoint, self._roster.settings.supervisor.ready_timeout)
        except Exception as error:
            if not isinstance(error, SleepFailed):
                _log.exception("waking %s failed", name)
            if worker.told is None and not worker.over:
                await worker.child.kill()
                await self._endings.broke(name, worker, LoadFailed(f"model {name!r} did not wake: {error}"), began)
            return
        await self._announce(name, worker, action.reason, time.monotonic() - began)

    async def _resize(self, action: Resize, worker: Worker) -> None:
        timeout = self._roster.settings.supervisor.ready_timeout
        self._inbox.post(await resize(action, worker, self._margin, self._meter, timeout))

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
        self._crew.workers[name] = worker
        self._meter.watch(name, child.pid)
        self._crew.last_ready[name] = child.ready
        used = await self._meter.measure_load(name)
        worker.announced = True
        self._logs.of(name).event("adopt", time.monotonic() - began, {}, used, pid=child.pid)
        if self._keeper is not None:
            self._keeper.begin(self._roster.entries[name], child.ready)
        self._inbox.post(ev.Adopted(name, dict(record.allowance), used, child.ready.sleeps and may_sleep))
        self._crew.spawn(self._endings.watch(name, worker, child))

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def ready(self, name: str) -> Ready | None:
        """What the live worker of a model said when it was ready, None when there is none."""
        child = self._crew.live(name)
        return child.ready if child is not None else None

    def last_ready(self, name: str) -> Ready | None:
        """What the newest worker of a model said, also after it went."""
        return self._crew.last_ready.get(name)

    def pid(self, name: str) -> int | None:
        """The live worker's process, None when there is none."""
        child = self._crew.live(name)
        return child.pid if child is not None else None

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
        return await self._endings.why(name, endpoint, patience)

    # ── end ─────────────────────────────────────────────────────────────────────────────────────

    async def stop_all(self, grace: float) -> None:
        """End every worker at once (shutdown); returns when all are gone."""
        ends = [self._endings.shut(name, worker, grace) for name, worker in self._crew.workers.items()]
        await asyncio.gather(self._spare.close(), *ends)  # that first: a load that is ended here needs no next one
        await self._crew.cancel_all()
        self._logs.close()

    async def kill_all(self) -> None:
        """Do not wait for the grace of those that `stop_all` is ending."""
        workers = list(self._crew.workers.items())
        await asyncio.gather(*(self._endings.end_process(name, worker, 0.0) for name, worker in workers))
