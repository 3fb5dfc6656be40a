"""The daemon's parts wired together on fakes: a test decides when workers are ready, die and leave, what they take."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagein.catalog.model import ModelEntry, Need, NeedSource
from pagein.catalog.observed import PeakStore
from pagein.config.schema import Settings
from pagein.daemon import desk, endings, fleet, inbox, journal, meter, release, run, states, views
from pagein.daemon.parts_watch import PartsWatch
from pagein.daemon.rollouts import Rollouts
from pagein.daemon.rooms import Rooms
from pagein.daemon.roster import Roster
from pagein.errors import PageinError, WorkerDied
from pagein.memory.budget import PoolBudget
from pagein.memory.snapshot import MachineSnapshot, PoolReading, TreeReading
from pagein.protocol import Capability, Endpoint, Ready, WorkerSpec
from pagein.residency.lifecycle import State
from pagein.scheduler import ModelState, Scheduler, SchedulerState
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action
from pagein.supervisor.limits import NoGroups

MIB = 1024**2


class FakeSpare:
    """Stands for `pagein.supervisor.spare.Spare`: tells what was asked of it, and hands nothing over."""

    def __init__(self, environ: Any = None, registry: Any = None) -> None:
        self.pid: int | None = None
        self.acts: list[str] = []

    def take(self, environ: Any) -> None:
        self.acts.append("take")

    def refill(self) -> None:
        self.acts.append("refill")

    async def close(self) -> None:
        self.acts.append("close")


class FakeChild:
    """Stands for `pagein.supervisor.child.Child`: the same promises, kept when the test says so."""

    ready: Ready
    configured: WorkerSpec | None

    def __init__(self, lab: Lab, spec: WorkerSpec) -> None:
        self.lab, self.spec, self.name, self.pid = lab, spec, spec.name, next(lab.pids)
        loop = asyncio.get_running_loop()
        self.becoming: asyncio.Future[Ready] = loop.create_future()
        self._end: asyncio.Future[PageinError | None] = loop.create_future()
        self.asked = False
        self.stubborn = False
        """Goes on after SIGTERM, until it is killed."""
        self.immortal = False
        """Goes on after SIGKILL, until the test lets it go."""
        self.left: list[list[int]] = []
        """What each look at the tree finds after its end; nothing once the list is empty."""
        self.graces: list[float] = []
        self.kills = 0

    @property
    def ended(self) -> bool:
        return self._end.done()

    # ── what the fleet does ─────────────────────────────────────────────────────────────────────

    async def stop(self, grace: float) -> None:
        self.graces.append(grace)
        self.asked |= not self.ended
        if not self.stubborn:
            self.end(None)
        await asyncio.shield(self._end)

    async def kill(self) -> None:
        self.kills += 1
        self.asked |= not self.ended
        if not self.immortal:
            self.end(None)
        await asyncio.shield(self._end)

    async def exited(self) -> PageinError | None:
        error = await asyncio.shield(self._end)
        return None if self.asked else error

    async def pids(self) -> list[int]:
        await asyncio.sleep(0)
        return self.left.pop(0) if self.left else []

    # ── what the test does ──────────────────────────────────────────────────────────────────────

    def become_ready(self, ram: int = MIB, endpoint: Endpoint | None = None) -> None:
        self.lab.ram[self.pid] = ram
        endpoint = endpoint or Endpoint(socket=f"/run/{self.pid}.sock")
        self.becoming.set_result(Ready(self.spec.token, endpoint, [Capability.CHAT], "1.0", self.spec.context))

    def fail(self, error: BaseException) -> None:
        self.becoming.set_exception(error)

    def die(self) -> None:
        self.end(WorkerDied(f"model {self.name!r} ended: its worker was ended by SIGSEGV"))

    def end(self, error: PageinError | None) -> None:
        if not self.ended:
            self.lab.ram.pop(self.pid, None)
            self._end.set_result(error)


class Lab:
    """Inbox, scheduler, meter, fleet, desk, journal and view over fake children, probes and clock."""

    def __init__(self, folder: Path, budget: int = 1000 * MIB, **models: dict[str, Any]) -> None:
        self.now = 1000.0
        self.pids = itertools.count(5000)
        self.ram: dict[int, int] = {}
        self.ram_peak: dict[int, int] = {}
        self.gpu: dict[int, dict[str, int]] = {}
        self.own: int | None = 10 * MIB
        self.available: int | None = None
        self.watched: frozenset[str] = frozenset()
        self.children: list[FakeChild] = []
        needs = {name: given.pop("need", 100 * MIB) for name, given in models.items()}
        given = {name: {"command": "serve", **rows} for name, rows in models.items()}
        self.settings = Settings.model_validate(
            {
                "state_dir": str(folder),
                "server": {"port": 0},
                "scheduler": {"min_residency": 0, "hold": 0},
                "models": given,
            }
        )
        self.entries = {name: self._entry(name, needs[name]) for name in models}
        self.budgets = {"ram": PoolBudget("ram", budget, "configured")}
        self.peaks = PeakStore.open(folder / "peaks.sqlite")
        self.folder = folder
        self.log: list[tuple[ev.Event, list[Action]]] = []

    def wire(self) -> Lab:
        """Put the parts together as `Daemon` does."""
        given = [states.model_state(self.settings, entry, self.peaks) for entry in self.entries.values()]
        budgets = {name: budget.bytes for name, budget in self.budgets.items()}
        self.state = SchedulerState(budgets, given, states.limits(self.settings, self.watched))
        self.inbox = inbox.Inbox(Scheduler(self.state))
        self.journal = journal.Journal()
        self.spare = spare = FakeSpare()
        self.meter = meter.Meter(self.entries, self.inbox, self.peaks, 0.5, spare)
        self.roster = roster = Roster(self.settings, self.entries)
        self.limiter = limiter = NoGroups("the watchdog, in this test")
        made = self.rollouts = Rollouts(roster)
        self.fleet = fleet.Fleet(roster, self.inbox, self.meter, self.folder / "run", spare, limiter, rollouts=made)
        parts = self.parts = PartsWatch(roster, self.fleet, self.journal, made)
        self.view = views.View(roster, self.budgets, self.inbox, self.meter, self.fleet, parts=parts)
        self.rooms = Rooms(self.inbox, self.meter)
        shown = self.journal, self.view, self.rooms, parts
        self.desk = desk.DaemonDesk(roster, self.inbox, self.fleet, *shown, made)
        for listener in (roster, self.journal, self.desk, self.rooms, self.fleet, parts, self):
            self.inbox.add_listener(listener)
        return self

    def patch(self, monkeypatch: Any) -> Lab:
        """Put the fakes in place of processes, probes and clocks."""
        clock = SimpleNamespace(monotonic=lambda: self.now, time=lambda: self.now)
        for module in (desk, endings, fleet, inbox, release, views):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(fleet, "Child", SimpleNamespace(start=self._start))
        monkeypatch.setattr(release, "PAUSE", 0.0)
        monkeypatch.setattr(release, "PAUSE_MAX", 0.0)
        monkeypatch.setattr(desk, "EXIT_NOTICE", 0.02)
        monkeypatch.setattr(meter, "TreeSampler", lambda: SimpleNamespace(sample=lambda pids: self.read_trees(pids)))
        monkeypatch.setattr(meter, "read_trees", lambda pids: self.read_trees(pids))
        monkeypatch.setattr(meter, "read_machine", lambda: self.read_machine())
        monkeypatch.setattr(run, "Spare", FakeSpare)
        for module in (meter, run):
            monkeypatch.setattr(module, "pss_of", lambda pid: self.own)
        monkeypatch.setattr(asyncio, "to_thread", _at_once)
        return self

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        self.log.append((event, actions))
        for ledger in self.state.ledgers.values():
            ledger.check()

    async def _start(
        self, spec: WorkerSpec, *, on_spawn: Any, configured: WorkerSpec | None = None, **_: Any
    ) -> FakeChild:
        child = FakeChild(self, spec)
        child.configured = configured
        self.children.append(child)
        try:
            on_spawn(child.pid)
            child.ready = await child.becoming
        except PageinError:
            child.end(None)
            raise
        except BaseException:
            await asyncio.shield(child.kill())
            raise
        return child

    # ── fake probes ─────────────────────────────────────────────────────────────────────────────

    def read_trees(self, pids: Any) -> dict[int, TreeReading | None]:
        return {pid: self._tree(pid) for pid in pids}

    def _tree(self, pid: int) -> TreeReading | None:
        if pid not in self.ram:
            return None
        ram = self.ram[pid]
        return TreeReading((pid,), ram, max(ram, self.ram_peak.get(pid, 0)), dict(self.gpu.get(pid, {})))

    def read_machine(self) -> MachineSnapshot:
        return MachineSnapshot({"ram": PoolReading("ram", 64 * 1024 * MIB, self.available, "physical memory")})

    # ── what tests ask ──────────────────────────────────────────────────────────────────────────

    def child(self, name: str) -> FakeChild:
        """The newest child of a model."""
        return [child for child in self.children if child.name == name][-1]

    def model(self, name: str) -> ModelState:
        return self.state.models[name]

    def events(self, *kinds: type) -> list[str]:
        return [type(event).__name__ for event, _ in self.log if isinstance(event, kinds)]

    def loads(self, name: str) -> int:
        return sum(child.name == name for child in self.children)

    def log_lines(self, name: str) -> list[str]:
        """Pagein's own lines in a model's log, without their time."""
        lines = Path(self.fleet.log_path(name)).read_text().splitlines()
        return [line.split(" ", 2)[2] for line in lines if " pagein " in line]

    async def settle(self) -> None:
        """Let everything run that can run without the outside."""
        for _ in range(30):
            await asyncio.sleep(0)

    async def resident(self, name: str, ram: int = MIB, endpoint: Endpoint | None = None) -> FakeChild:
        """Bring a model in by an operator's load."""
        loading = asyncio.ensure_future(self.desk.load(name))
        await self.settle()
        self.child(name).become_ready(ram, endpoint)
        await loading
        assert self.model(name).state is State.RESIDENT
        return self.child(name)

    def acquire(self, name: str, **more: Any) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.desk.acquire(name, Capability.CHAT, **more))

    async def close(self) -> None:
        """End everything, and see that nothing is left."""
        for child in self.children:
            child.stubborn = child.immortal = False
        await self.fleet.stop_all(1.0)
        self.peaks.close()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, left

    @staticmethod
    def _entry(name: str, need: int | dict[str, int]) -> ModelEntry:
        bytes_ = need if isinstance(need, dict) else {"ram": need}
        declared = Need(bytes_, NeedSource.DECLARED, "declared")
        return ModelEntry(
            name=name,
            engine="command",
            engine_version="",
            capabilities=frozenset({Capability.CHAT}),
            info=None,
            device="cpu",
            estimate=declared,
            need=declared,
            peak_key=f"key of {name}",
        )


async def _at_once(work: Any, *arguments: Any) -> Any:
    await asyncio.sleep(0)
    return work(*arguments)
