"""Measures what workers and daemon take, tells the inbox, and remembers peaks for the next load (rule 2)."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from dataclasses import dataclass, field

from pagein.catalog.model import ModelEntry, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.catalog.resolve import with_headroom
from pagein.daemon.inbox import Inbox
from pagein.memory.budget import less_mapped
from pagein.memory.pressure import PressureGauge
from pagein.memory.probes.host import read_machine
from pagein.memory.probes.process import TreeSampler, pss_of, read_trees
from pagein.memory.snapshot import MachineSnapshot, TreeReading
from pagein.scheduler import events as ev
from pagein.supervisor.spare import Spare

_log = logging.getLogger("pagein.meter")

NOTABLE = 1024**2
"""Bytes by which a peak must pass the next load's reservation before that is raised."""


@dataclass(slots=True)
class _Watched:
    pid: int
    mapped: int = 0
    """Bytes of files that it has mapped: the machine counts them as available, and they are in use."""
    last: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int | None] = field(default_factory=dict)
    """What the machine had available at that sample, per pool."""
    at_last_use: dict[str, int] = field(default_factory=dict)
    peak: dict[str, int] = field(default_factory=dict)


class Meter:
    """Samples process trees in a thread; everything else happens on the event loop."""

    def __init__(
        self, entries: dict[str, ModelEntry], inbox: Inbox, peaks: PeakStore, every: float, spare: Spare
    ) -> None:
        self._entries, self._inbox, self._peaks, self._every = entries, inbox, peaks, every
        self._spare = spare
        self._watched: dict[str, _Watched] = {}
        self._sampler = TreeSampler()
        self._gauge = PressureGauge()
        self._rooms: dict[str, int] = {}
        """Processes that hold outsiders' leases, by lease."""
        self.available: dict[str, int | None] = {}
        """What the machine has available, per pool, at the last look."""
        self.daemon_bytes: int | None = None
        self.highest: dict[str, int] = {}
        """Highest measured sum of daemon and workers, per pool."""

    async def run(self) -> None:
        """Sample for ever, and let the scheduler see that time passes, also while a sample takes long."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sample_for_ever())
            group.create_task(self._tick_for_ever())

    async def _sample_for_ever(self) -> None:
        while True:
            try:
                await self.sample()
            except Exception:  # a fault of one sample must not end the watch
                _log.exception("a memory sample failed")
            await asyncio.sleep(self._every)

    async def _tick_for_ever(self) -> None:
        while True:
            self._inbox.post(ev.Ticked())
            await asyncio.sleep(self._every)

    async def sample(self) -> None:
        """Measure everything once and tell the inbox."""
        rooms = dict(self._rooms)
        pids = {name: watched.pid for name, watched in self._watched.items()} | rooms
        trees, own, machine = await asyncio.to_thread(self._read, list(pids.values()), self._spare.pid)
        used: dict[str, dict[str, int]] = {}
        for name, pid in pids.items():
            watched, tree = self._watched.get(name), trees.get(pid)
            if watched is not None and watched.pid == pid and tree is not None:
                used[name] = self._note(name, watched, tree)
        workers = dict(used)
        used |= {room: {"ram": tree.ram, **tree.gpu} for room, pid in rooms.items() if (tree := trees.get(pid))}
        self.daemon_bytes = own
        self._sum_up(workers, own)
        pressure = self._gauge.observe(machine, time.monotonic())
        available = self._look(machine)
        for name in workers:
            self._watched[name].beside = available
        self._inbox.post(ev.Measured(used, available, own, pressure))

    def _read(
        self, pids: list[int], spare: int | None
    ) -> tuple[dict[int, TreeReading | None], int | None, MachineSnapshot]:
        own = pss_of(os.getpid())
        waiting = pss_of(spare) if spare is not None else None
        return self._sampler.sample(pids), own if own is None else own + (waiting or 0), read_machine()

    def _note(self, name: str, watched: _Watched, tree: TreeReading) -> dict[str, int]:
        watched.mapped = tree.mapped or 0
        watched.last = {"ram": tree.ram, **tree.gpu}
        for pool, count in {"ram": tree.ram_peak, **tree.gpu}.items():
            watched.peak[pool] = max(count, watched.peak.get(pool, 0))
        self._learn(name)
        return watched.last

    def _learn(self, name: str) -> None:
        """Tell the scheduler when a load must reserve other bytes next time.

        A peak below the present need counts only once the model was used, since a load alone shows too little, and
        only in place of a guess: the peak of earlier, larger uses counts too. What cannot be measured stays.
        A model that keeps within whatever it is given teaches nothing.
        """
        if self._entries[name].least is not None:
            return
        model = self._inbox.scheduler.state.models[name]
        measured, before = with_headroom(self.peak(name) or {}), model.need
        may_shrink = model.answered and model.need_source != NeedSource.MEASURED
        if not may_shrink:
            measured = {pool: max(count, before.get(pool, 0)) for pool, count in measured.items()}
        if may_shrink or any(count > before.get(pool, 0) + NOTABLE for pool, count in measured.items()):
            self._inbox.post(ev.NeedLearned(name, {**before, **measured}, NeedSource.MEASURED.value))

    def _sum_up(self, used: dict[str, dict[str, int]], own: int | None) -> None:
        sums: dict[str, int] = {"ram": own or 0}
        for reading in used.values():
            for pool, count in reading.items():
                sums[pool] = sums.get(pool, 0) + count
        for pool, count in sums.items():
            self.highest[pool] = max(count, self.highest.get(pool, 0))

    async def measure_load(self, name: str) -> dict[str, int]:
        """Measure one worker right after it became ready; empty where that cannot be done.

        What the machine has available is told with it: what the load took must not stand in the older figure too.
        """
        watched = self._watched.get(name)
        if watched is None:
            return {}
        try:
            trees, machine = await asyncio.to_thread(_read_load, watched.pid)
        except Exception:  # unknown, so all that was granted counts as still to come
            _log.exception("measuring the load of %s failed", name)
            return {}
        tree = trees.get(watched.pid)
        if tree is None or self._watched.get(name) is not watched:
            return {}
        used = self._note(name, watched, tree)
        watched.at_last_use = dict(used)
        watched.beside = self._look(machine)
        self._inbox.post(ev.Measured({name: used}, watched.beside))
        return used

    async def measure_machine(self) -> None:
        """Tell the inbox what the machine has available now, before bytes are called free."""
        try:
            machine = await asyncio.to_thread(read_machine)
        except Exception:  # the figure of the next sample counts
            _log.exception("reading the machine's memory failed")
            return
        self._inbox.post(ev.Measured({}, self._look(machine)))

    async def measure_processes(self, pids: list[int]) -> int:
        """Bytes of RAM that single processes take together; those that are gone take nothing."""
        readings = await asyncio.to_thread(lambda: [pss_of(pid) for pid in pids])
        return sum(reading or 0 for reading in readings)

    def _look(self, machine: MachineSnapshot) -> dict[str, int | None]:
        machine = less_mapped(machine, sum(watched.mapped for watched in self._watched.values()))
        self.available = {name: pool.available for name, pool in machine.pools.items()}
        return dict(self.available)

    def watch_room(self, room: str, pid: int) -> None:
        """Measure the process that holds an outsider's lease, with its children."""
        self._rooms[room] = pid

    def forget_room(self, room: str) -> None:
        """The lease ended."""
        self._rooms.pop(room, None)

    def watch(self, name: str, pid: int) -> None:
        """Measure this process tree from now on."""
        self._watched[name] = _Watched(pid)

    def forget(self, name: str) -> None:
        """The worker is gone: learn from its last use, which perhaps no sample saw, and remember its peak for ever."""
        if name in self._watched and self._watched[name].peak:
            self._learn(name)
        self._remember(name)

    def _remember(self, name: str) -> None:
        """Keep a peak for the next start, too, that of a load alone as a lower bound."""
        watched = self._watched.pop(name, None)
        if watched is None or not watched.peak:
            return
        model, entry = self._inbox.scheduler.state.models[name], self._entries[name]
        self._peaks.remember(entry.peak_key, name, watched.peak, model.load_seconds, in_use=model.answered)

    def close(self) -> None:
        """Remember the peaks of everything that is still watched."""
        for name in list(self._watched):
            self._remember(name)

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def last(self, name: str) -> dict[str, int]:
        """Bytes of a worker at its last sample, per pool; empty when there is none."""
        watched = self._watched.get(name)
        return watched.last if watched is not None else {}

    def beside(self, name: str) -> dict[str, int | None]:
        """What the machine had available at a worker's last sample, per pool; empty when there is none."""
        watched = self._watched.get(name)
        return watched.beside if watched is not None else {}

    def peak(self, name: str) -> dict[str, int] | None:
        """Highest bytes ever measured of a model, this worker or remembered."""
        watched = self._watched.get(name)
        remembered = self._peaks.peak(self._entries[name].peak_key)
        rows = [r for r in (watched.peak if watched else None, remembered.used if remembered else None) if r]
        pools = {pool for row in rows for pool in row}
        return {pool: max(row.get(pool, 0) for row in rows) for pool in pools} or None

    def since_last_use(self, name: str) -> tuple[dict[str, int], dict[str, int]]:
        """Bytes of a worker per pool at the end of the use before, and now (last samples)."""
        watched = self._watched.get(name)
        if watched is None:
            return {}, {}
        before, watched.at_last_use = watched.at_last_use, dict(watched.last)
        return before, watched.at_last_use


def _read_load(pid: int) -> tuple[dict[int, TreeReading | None], MachineSnapshot]:
    return read_trees([pid]), read_machine()
