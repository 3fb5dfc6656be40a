"""The wiring, and a daemon's life from start to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys

from aiohttp import web

from pagein import __version__
from pagein.catalog.model import ModelEntry
from pagein.catalog.observed import PeakStore
from pagein.catalog.resolve import resolve
from pagein.config.schema import Settings
from pagein.daemon.desk import DaemonDesk
from pagein.daemon.fleet import Fleet
from pagein.daemon.house import House
from pagein.daemon.inbox import Inbox
from pagein.daemon.journal import Journal
from pagein.daemon.meter import Meter
from pagein.daemon.views import View
from pagein.gateway.app import make_app, make_runner
from pagein.memory.budget import PoolBudget, resolve_budgets
from pagein.memory.probes.host import read_machine
from pagein.memory.probes.process import pss_of
from pagein.memory.snapshot import MachineSnapshot
from pagein.protocol import Capability, WorkerSpec
from pagein.scheduler import Limits, ModelState, Scheduler, SchedulerState
from pagein.scheduler import events as ev
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.spare import Spare
from pagein.units import format_bytes

_log = logging.getLogger("pagein")

OWN_HEADROOM = 16 * 1024**2
"""Bytes reserved for the daemon above what it takes at start; more is charged when it is measured."""


def serve(settings: Settings) -> int:
    """Run the daemon until SIGTERM or SIGINT; a second signal ends it at once. Returns the exit code.

    Raises PageinError when it cannot start (state folder taken, budget impossible, address in use).
    """
    with House(settings.state_dir) as house:
        return asyncio.run(_serve(settings, house))


async def _serve(settings: Settings, house: House) -> int:
    machine = read_machine()
    budgets = resolve_budgets(machine, settings.budget)
    peaks = PeakStore.open(settings.state_dir / "peaks.sqlite")
    try:
        entries = _resolve_all(settings, machine, peaks)
        daemon = Daemon(settings, house, budgets, entries, peaks)
        return await daemon.run()
    finally:
        peaks.close()


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
    ) -> None:
        self._settings, self._house = settings, house
        models = [model_state(settings, entry, peaks) for entry in entries.values()]
        state = SchedulerState({name: b.bytes for name, b in budgets.items()}, models, limits(settings))
        self.inbox = Inbox(Scheduler(state))
        self.journal = Journal()
        self._spare = Spare(worker_environment(WorkerSpec("", "", "", ""), {}))
        self._meter = Meter(entries, self.inbox, peaks, settings.scheduler.sample_every, self._spare)
        self._fleet = Fleet(settings, entries, self.inbox, self._meter, house.run_dir, self._spare)
        self._view = View(entries, budgets, self.inbox, self._meter, self._fleet)
        self.desk = DaemonDesk(settings, entries, self.inbox, self._fleet, self.journal, self._view)
        for listener in (self.journal, self.desk, self._fleet):
            self.inbox.add_listener(listener)
        self._stop = asyncio.Event()
        self._now = asyncio.Event()

    async def run(self) -> int:
        """Serve until told to stop, then drain and end everything."""
        self._listen_to_signals()
        own = pss_of(os.getpid())
        self.inbox.post(ev.Measured({}, {}, (own or 0) + OWN_HEADROOM))
        await self._meter.sample()  # no load is decided before it is known what the machine has
        runner = make_runner(make_app(self.desk, self._settings.server, __version__))
        await runner.setup()
        meter = asyncio.create_task(self._meter.run())
        try:
            await self._open_door(runner)
            self._spare.refill()
            for model in self.inbox.scheduler.state.models.values():
                if model.priority == "high" and model.problem is None:
                    self.inbox.post(ev.LoadWanted(model.name))
            await self._stop.wait()
            await self._drain()
        finally:
            self.journal.close()
            meter.cancel()
            await self._end_workers()
            self._meter.close()
            await self._close_door(runner)
        _log.info("stopped; every worker has ended")
        return 0

    async def _end_workers(self) -> None:
        """End all workers, with the grace that a second signal cuts short."""
        grace = 0.0 if self._now.is_set() else self._settings.supervisor.grace
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
        site = web.TCPSite(runner, server.host, server.port)
        await site.start()
        host, port = runner.addresses[0][:2]
        self._view.address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._house.publish(self._view.address)
        for pool in self._view.status().pools:
            _log.info("pool %s: budget %s (%s)", pool.name, format_bytes(pool.budget), pool.source)
        _log.info("Pagein %s answers at %s with %d models", __version__, self._view.address, len(self.desk.names()))

    async def _drain(self) -> None:
        """Refuse what waits, then let what is answered finish, at most for the grace or until a second signal."""
        self.inbox.post(ev.ShutdownWanted())
        left = len(self.inbox.scheduler.state.leases)
        if left:
            _log.info("stopping: %d requests may finish; a second signal ends them", left)
        waits = [asyncio.create_task(event.wait()) for event in (self.desk.drained, self._now)]
        await asyncio.wait(waits, timeout=self._settings.supervisor.grace, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _listen_to_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: int) -> None:
        if self._stop.is_set():
            self._now.set()
        else:
            _log.info("%s: stopping", signal.Signals(number).name)
        self._stop.set()


def model_state(settings: Settings, entry: ModelEntry, peaks: PeakStore) -> ModelState:
    """What the scheduler needs to know of a configured model."""
    model, seen = settings.models[entry.name], peaks.peak(entry.peak_key)
    return ModelState(
        name=entry.name,
        priority=model.priority.value,
        need=dict(entry.need.bytes),
        need_source=entry.need.source.value,
        parallel=model.parallel_for(entry.engine) + _ahead(entry),
        queue_limit=model.queue,
        keep_alive=model.keep_alive,
        pinned=model.pin,
        problem=entry.problem,
        load_seconds=seen.load_seconds if seen is not None else None,
    )


def _ahead(entry: ModelEntry) -> int:
    """Requests that a worker holds beyond those it computes: one, where they are short, so that it never waits.

    Workers of other engines hold several anyway; one that writes text keeps its time-out for itself.
    """
    writes = entry.capabilities & {Capability.CHAT, Capability.COMPLETION}
    return 1 if entry.engine == "llama_cpp" and not writes else 0


def limits(settings: Settings) -> Limits:
    """The scheduler's bounds from the configuration."""
    wanted, sup = settings.scheduler, settings.supervisor
    return Limits(wanted.low_linger, wanted.max_wait, wanted.patience, sup.backoff_first, sup.backoff_max)


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
