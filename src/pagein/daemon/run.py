"""The wiring, and a daemon's life from start to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from aiohttp import web

from pagein import __version__
from pagein.catalog.allot import allot
from pagein.catalog.model import ModelEntry
from pagein.catalog.observed import PeakStore
from pagein.catalog.resolve import resolve
from pagein.config.schema import Settings
from pagein.daemon.desk import DaemonDesk
from pagein.daemon.door import open_door
from pagein.daemon.fleet import Fleet
from pagein.daemon.house import House
from pagein.daemon.inbox import Inbox
from pagein.daemon.journal import Journal
from pagein.daemon.keeper import Keeper
from pagein.daemon.meter import Meter
from pagein.daemon.notify import ServiceManager
from pagein.daemon.parts_watch import PartsWatch
from pagein.daemon.reload import Reloader, describe, warn_of_broken
from pagein.daemon.rollouts import Rollouts
from pagein.daemon.rooms import Rooms
from pagein.daemon.roster import Roster
from pagein.daemon.states import limits, model_state, watched_pools
from pagein.daemon.thrift import few_arenas, give_back_for_ever, set_aside
from pagein.daemon.views import View
from pagein.daemon.watch_file import changes
from pagein.errors import PageinError
from pagein.gateway.app import make_app, make_runner
from pagein.memory.budget import PoolBudget, resolve_budgets
from pagein.memory.probes.host import read_machine
from pagein.memory.probes.process import pss_of
from pagein.memory.snapshot import MachineSnapshot
from pagein.protocol import WorkerSpec
from pagein.residency.lifecycle import State
from pagein.scheduler import Scheduler, SchedulerState
from pagein.scheduler import events as ev
from pagein.sessions.retention import Bounds
from pagein.sessions.store import FILE, SessionStore
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.limits import Limiter, find_limiter
from pagein.supervisor.registry import Record, Registry
from pagein.supervisor.spare import Spare
from pagein.supervisor.sweep import sweep
from pagein.units import format_bytes

_log = logging.getLogger("pagein")

OWN_HEADROOM = 16 * 1024**2
"""Bytes reserved for the daemon above what it takes at start; more is charged when it is measured."""


def serve(
    settings: Settings,
    reread: Callable[[], Settings] | None = None,
    path: Path | None = None,
    watch: bool = False,
) -> int:
    """Run the daemon until SIGTERM or SIGINT; a second signal ends it at once. Returns the exit code.

    ``reread`` loads the configuration anew for a reload (SIGHUP, `POST /api/reload`, and with ``watch`` whenever the
    file at ``path`` changes). Raises PageinError when it cannot start (state folder taken, budget impossible, address
    in use).
    """
    few_arenas()
    with House(settings.state_dir) as house:
        return asyncio.run(_serve(settings, house, reread, path if watch else None))


async def _serve(settings: Settings, house: House, reread: Callable[[], Settings] | None, watched: Path | None) -> int:
    machine = read_machine()
    budgets = resolve_budgets(machine, settings.budget)
    peaks = PeakStore.open(settings.state_dir / "peaks.sqlite")
    supervisor = settings.supervisor
    registry = Registry.open(settings.state_dir, supervisor.adopt_wait if supervisor.adopt else 0.0)
    limiter = find_limiter(supervisor.limits, settings.state_dir)
    sessions: SessionStore | None = None
    try:
        sizes = {name: budget.bytes for name, budget in budgets.items()}
        entries = allot(_resolve_all(settings, machine, peaks), settings.models, sizes)
        keeper = Keeper.open(settings.state_dir / "kv", settings)
        sessions = _open_sessions(settings)
        daemon = Daemon(settings, house, budgets, entries, peaks, limiter, registry, reread, keeper, sessions)
        return await daemon.run(watched)
    finally:
        if sessions is not None:
            sessions.close()
        limiter.close()
        registry.close()
        peaks.close()


def _open_sessions(settings: Settings) -> SessionStore | None:
    state = settings.state
    if not state.enabled:
        return None
    return SessionStore.open(settings.state_dir / FILE, Bounds(state.history_bytes, state.retain), state.salt)


def _resolve_all(settings: Settings, machine: MachineSnapshot, peaks: PeakStore) -> dict[str, ModelEntry]:
    return {name: resolve(name, model, machine, peaks) for name, model in settings.models.items()}


class Daemon:
    """Everything wired together; facts flow one way (ARCHITECTURE.md, rule 1)."""

    def __init__(
        self,
        settings: Settings,
        house: House,
        budgets: dict[str, PoolBudget],
        entries: dict[str, ModelEntry],
        peaks: PeakStore,
        limiter: Limiter,
        registry: Registry,
        reread: Callable[[], Settings] | None = None,
        keeper: Keeper | None = None,
        sessions: SessionStore | None = None,
    ) -> None:
        self._keeper, self._sessions = keeper, sessions
        if sessions is not None and keeper is not None:
            sessions.on_gone = keeper.forget_conversations
        self._settings, self._house, self._limiter, self._registry = settings, house, limiter, registry
        models = [model_state(settings, entry, peaks) for entry in entries.values()]
        watched = watched_pools(settings, list(budgets), limiter.hard)
        sizes = {name: budget.bytes for name, budget in budgets.items()}
        self.inbox = Inbox(Scheduler(SchedulerState(sizes, models, limits(settings, watched))))
        self.journal = Journal()
        roster = self._roster = Roster(settings, entries)
        self._spare = Spare(worker_environment(WorkerSpec("", "", "", ""), {}), registry)
        self._meter = Meter(entries, self.inbox, peaks, settings.scheduler.sample_every, self._spare)
        rollouts, outside = Rollouts(roster), (self._spare, limiter, registry)
        self._fleet = Fleet(roster, self.inbox, self._meter, house.run_dir, *outside, keeper, rollouts)
        self._parts = PartsWatch(roster, self._fleet, self.journal, rollouts)
        self._view = View(roster, budgets, self.inbox, self._meter, self._fleet, limiter.describe(), self._parts)
        self._rooms = Rooms(self.inbox, self._meter)
        self._reloader = Reloader(reread, roster, self.inbox, budgets, peaks, watched) if reread is not None else None
        shown = self.journal, self._view, self._rooms, self._parts
        self.desk = DaemonDesk(roster, self.inbox, self._fleet, *shown, rollouts, self._reloader, keeper)
        for listener in (roster, self.journal, self.desk, self._rooms, self._fleet, self._parts):
            self.inbox.add_listener(listener)
        self._manager = ServiceManager()
        self._reloading: set[asyncio.Task[None]] = set()
        self._stop = asyncio.Event()
        self._now = asyncio.Event()

    async def run(self, watched: Path | None = None) -> int:
        """Serve until told to stop, then drain and end everything; applies the ``watched`` file when it changes."""
        self._listen_to_signals()
        own = pss_of(os.getpid())
        self.inbox.post(ev.Measured({}, {}, (own or 0) + OWN_HEADROOM))
        await self._clean_up()
        if self._sessions is not None:
            await self._sessions.sweep()
            if self._keeper is not None:
                known = await self._sessions.known()
                await self._keeper.saving.keep_only(known)
                await self._keeper.blocks.keep_only(known)
        await self._meter.sample()  # no load is decided before it is known what the machine has
        runner = make_runner(make_app(self.desk, self._settings.server, __version__, self._sessions))
        await runner.setup()
        works = (self._meter.run(), self._parts.run(), self._manager.keep_alive(), give_back_for_ever())
        background = [asyncio.create_task(work) for work in works]
        if self._keeper is not None:
            background.append(asyncio.create_task(self._keeper.look_after(self._settings.state.retain)))
        if watched is not None:
            background.append(asyncio.create_task(self._watch(watched)))
        try:
            await self._open_door(runner)
            set_aside()
            self._spare.refill()
            for model in self.inbox.scheduler.state.models.values():
                if model.priority == "high" and model.problem is None and model.state is State.ABSENT:
                    self.inbox.post(ev.LoadWanted(model.name, speculative=True))
            await self._stop.wait()
            await self._drain()
        finally:
            self.journal.close()
            self.inbox.close()
            for task in background:
                task.cancel()
            await self._end_workers()
            if self._keeper is not None:
                await self._keeper.close()
            self._meter.close()
            await self._close_door(runner)
        _log.info("stopped; every worker has ended")
        return 0

    async def _clean_up(self) -> None:
        """End what an earlier daemon of this state folder left, or take it over, before the first load."""
        cells = self._limiter.sweep()
        digests = {name: self._fleet.digest_of(name) for name in self._roster.entries}

        def unchanged(record: Record) -> bool:
            return self._settings.supervisor.adopt and digests.get(str(record.name)) == record.digest

        swept = await sweep(self._registry, unchanged)
        for record in swept.kept:
            await self._fleet.adopt(record, cells)
        if self._keeper is not None:
            adopted = [self._fleet.ready(str(record.name)) for record in swept.kept]
            folders = {r.state.folder for r in adopted if r is not None and r.state is not None}
            self._keeper.sweep(folders, self._roster.entries)
        kept = {record.pid for record in swept.kept}
        for cell in cells:
            if not kept & set(cell.pids()):
                await asyncio.to_thread(cell.kill)
                cell.remove()

    async def _watch(self, path: Path) -> None:
        async for _ in changes(path):
            _log.info("%s changed", path.name)
            await self._reload()

    async def _reload(self) -> None:
        """Apply the file; one that is wrong changes nothing, and the log says why."""
        if self._reloader is None:
            _log.warning("there is no configuration file to read again")
            return
        self._manager.reloading()
        try:
            told = describe(await self._reloader.reload())
        except PageinError as error:
            told = f"the configuration was not applied: {error.message}"
            _log.error("%s", told)
        except Exception as fault:  # the next edit is to be seen, and systemd waits for the end of this one
            told = f"the configuration was not applied: {fault}"
            _log.exception("a reload failed")
        self._manager.ready(told)

    async def _end_workers(self) -> None:
        """End all workers, with the grace that a second signal cuts short."""
        grace = 0.0 if self._now.is_set() else self._grace
        ending = asyncio.create_task(self._fleet.stop_all(grace))
        if not await self._before_second_signal(ending):
            await self._fleet.kill_all()
        await ending

    async def _close_door(self, runner: web.AppRunner) -> None:
        """End the connections: those that are being answered get a moment, unless a second signal came."""
        closing = asyncio.create_task(runner.cleanup())
        if not await self._before_second_signal(closing):
            closing.cancel()
            await asyncio.wait([closing])
        elif (fault := closing.exception()) is not None:
            raise fault

    async def _before_second_signal(self, work: asyncio.Task[None]) -> bool:
        """Wait for the work; False when a second signal came and it is not done."""
        now = asyncio.create_task(self._now.wait())
        await asyncio.wait((work, now), return_when=asyncio.FIRST_COMPLETED)
        now.cancel()
        return work.done()

    async def _open_door(self, runner: web.AppRunner) -> None:
        server = self._settings.server
        self._view.address = await open_door(runner, server.host, server.port)
        self._house.publish(self._view.address)
        for pool in self.desk.status().pools:
            _log.info("pool %s: budget %s (%s)", pool.name, format_bytes(pool.budget), pool.source)
        _log.info("workers: %s", self._limiter.describe())
        _log.info("Pagein %s answers at %s with %d models", __version__, self._view.address, len(self.desk.names()))
        warn_of_broken(self._roster.entries)
        self._manager.ready(f"answers at {self._view.address} with {len(self.desk.names())} models")

    async def _drain(self) -> None:
        """Refuse what waits, then let what is answered finish, at most for the grace or until a second signal."""
        self.inbox.post(ev.ShutdownWanted())
        left = len(self.inbox.scheduler.state.leases)
        if left:
            _log.info("stopping: %d requests may finish; a second signal ends them", left)
        self._manager.stopping(f"{left} requests may finish")
        waits = [asyncio.create_task(event.wait()) for event in (self.desk.drained, self._now)]
        await asyncio.wait(waits, timeout=self._grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    @property
    def _grace(self) -> float:
        return self._roster.settings.supervisor.grace

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_hangup(self) -> None:
        task = asyncio.get_running_loop().create_task(self._reload())
        self._reloading.add(task)
        task.add_done_callback(self._reloading.discard)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._now.set()
        else:
            _log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()


def set_up_logging(verbose: bool) -> None:
    """Daemon log to standard error: decisions with their reasons; with ``verbose`` also grants and waits."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(message)s",
        datefmt="%H:%M:%S",
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
