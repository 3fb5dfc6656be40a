"""What ``model.pagein`` is: calls under a lease, parts by hand, and how they are. `opening` makes it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from pagein.catalog.split.plan import STORED, SplitPlan
from pagein.catalog.split.precision import Precisions
from pagein.catalog.split.root import PartsRoot
from pagein.errors import ModelUnsuited, TaskUnclear
from pagein.parts.adapters import ACTIVE, Adapter, Owner, Selection
from pagein.parts.adapting import make_adaptable
from pagein.parts.deferring import DeferringLock
from pagein.parts.events import PartEventKind, PartEvents
from pagein.parts.face import give_face
from pagein.parts.files.audit import Audit, no_audit
from pagein.parts.files.part_file import PartReader
from pagein.parts.groups import Group, groups_of, set_rivals
from pagein.parts.guard import Guard
from pagein.parts.lease import Lease, Stream, in_force
from pagein.parts.levels import set_level
from pagein.parts.line import Wanted, is_wanted
from pagein.parts.order import order_on
from pagein.parts.packed_layers import pack_layers
from pagein.parts.plan_facts import adapted_modules, chain_of
from pagein.parts.publish import Cast, Seats
from pagein.parts.renewal import refresh, replace
from pagein.parts.report import PartsReport, report_of
from pagein.parts.residency import Residency
from pagein.parts.rollout import Level
from pagein.parts.shrinking import keep_within
from pagein.parts.sweeper import Sweeper
from pagein.parts.tripwire import lay_tripwires
from pagein.parts.whole import Still, cast_all
from pagein.units import parse_bytes


class Parts:
    """One split model's parts: what `model.pagein` is. Any thread may call it."""

    def __init__(
        self,
        model: Any,
        root: PartsRoot,
        reader: PartReader,
        guard: Guard,
        device: torch.device,
        forms: Mapping[str, str],
        precision: Precisions = STORED,
        wait: float = 30.0,
        audit: Audit = no_audit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.wait, self.owner = model, wait, Owner()
        self.root, self.precision, self.digest = root, precision, reader.plan.digest
        self._reader, self._clock = reader, clock
        weakref.finalize(self, root.close).atexit = False
        self.vouch: Callable[[bytes], None] | None = None
        """Asked of every plan that is read again."""
        self.seats = Seats(model, reader.plan, device, pack_layers(model, reader.plan, forms))
        lock = DeferringLock()
        groups = groups_of(reader.plan.parts.values(), self.seats, lock, forms)
        set_rivals(groups.values(), self.seats)
        self.residency = Residency(groups, self.seats, guard, reader, lock, order_on(device), clock, audit=audit)
        self.has_limit = True
        """Whether someone said how much memory all parts may take."""
        self.pinned_by_level: set[str] = set()
        """What level ``off`` keeps and nobody pinned by hand."""
        self._sweeper: Sweeper | None = None
        self._closed = False
        for group in groups.values():
            self.seats.withdraw(group.part, group.entry, group.tasks, group.cast_types)
        make_adaptable(model, adapted_modules(reader.plan), self.owner)
        lay_tripwires(model, self.residency)
        give_face(model, self)

    def start(self, level: Level = Level.AUTO, sweep_seconds: float | None = None) -> None:
        """Load the backbone, or everything at level off, and begin to look for idle parts. Blocks on the disk."""
        backbone = self.plan.backbone
        if backbone is not None:
            self.pin(backbone)
            self.load(backbone, who="start")
        self.set_level(level)
        if sweep_seconds is not None:
            self._sweeper = Sweeper(self, sweep_seconds)

    @property
    def plan(self) -> SplitPlan:
        """The plan as it is now."""
        return self._reader.plan

    @property
    def level(self) -> Level:
        """How much is done on demand."""
        return self.residency.level

    @property
    def events(self) -> PartEvents:
        """What happened to its parts of late."""
        return self.residency.events

    @property
    def bytes_read(self) -> int:
        """Bytes of parts' files that were read so far: it grows while a load goes on."""
        return self._reader.bytes_read

    # ── calls ───────────────────────────────────────────────────────────────────────────────────────

    def lease(
        self,
        task: str | None = None,
        *,
        whole: bool = False,
        who: str = "",
        wait: float | None = None,
        wanted: Wanted = is_wanted,
    ) -> Lease:
        """Return a lease on a task's parts, to be held by ``with``; ``whole`` takes every part of the model, at any
        level.

        ``who`` stands in the audit line; ``wanted`` is asked now and then while it waits for memory, and ends the wait.
        Raises UnknownTask, or TaskUnclear where the model has several and none is
        named.
        """
        name = self._task(task)
        patience = self.wait if wait is None else wait

        def take() -> tuple[Group, ...]:
            if whole:
                return self.residency.acquire(self._whole_for(name), None, who, patience, by_hand=True, wanted=wanted)
            return self._acquire(name, who, patience, in_force(self.owner, name, ()), wanted)

        return Lease(name, self.owner, take, self.residency.release, partial(self._select, name))

    def run(self, compute: Callable[[str], Any], task: str | None = None) -> Any:
        """Compute under a lease of the task and return what comes; what yields keeps the lease until it ends.

        ``compute`` is told the task's name.
        """
        active = ACTIVE.get()
        named = None if task is None else self.plan.task(task).name
        if active is not None and active.owner is self.owner and named in (None, active.task):
            return compute(active.task)
        held = in_force(self.owner, named, self.plan.tasks)
        name = self._task(named) if held is None else held.task
        groups = self._acquire(name, "", self.wait, held)
        release = partial(self.residency.release, groups)
        try:
            selection = self._select(name, groups)
            token = ACTIVE.set(selection)
            try:
                result = compute(name)
            finally:
                ACTIVE.reset(token)
        except BaseException:
            release()
            raise
        if hasattr(result, "__next__"):
            return Stream(result, selection, release)
        release()
        if hasattr(result, "__anext__") or hasattr(result, "__await__"):
            if hasattr(result, "close"):
                result.close()
            why = "gives its answer later, and the lease of this call has ended"
            raise ModelUnsuited(f"{type(self.model).__name__} {why}", hint="hold `model.lease(task)` around the call")
        return result

    # ── by hand ─────────────────────────────────────────────────────────────────────────────────────

    def load(self, part: str, *, who: str = "") -> None:
        """Bring a part in, through the same door as calls; raises as they do."""
        name = self.plan.part(part).name
        self.residency.release(self.residency.acquire([name], None, who, self.wait, by_hand=True))

    def unload(self, part: str) -> bool:
        """Let a part go; False where it is not there, in use or pinned. Never waits for calls."""
        return self.residency.unload(self.standing(part))

    def pin(self, part: str, pinned: bool = True) -> bool:
        """Keep a part once it is there, or no longer; brings nothing in. Returns whether that is a change."""
        with self.residency.lock:
            self.pinned_by_level.discard(self.plan.part(part).name)
            name = self.standing(part)
            changes = self.residency.guard.is_pinned(name) != pinned
            if changes:
                self.residency.guard.pin(name, pinned)
                self.events.add(PartEventKind.PIN if pinned else PartEventKind.UNPIN, name)
            return changes

    def warm(self, task: str, *, who: str = "warm-up") -> None:
        """Bring a task's parts in before the first call of it, at any level."""
        found = self.plan.task(task)
        self.residency.release(self.residency.acquire(found.parts, found.name, who, self.wait, by_hand=True))

    def replace(self, part: str, by: str, *, who: str = "") -> None:
        """Let a part stand in another's place while calls run: each of them has the old one or the new one, whole.

        The new file is proven first, byte by byte; where it is not what the plan says, PartRefused is raised, and the
        old one serves on. ``by`` may be ``part`` itself, to go back. Waits for running calls with the old one.
        """
        replace(self, part, by, who)

    def refresh(self) -> None:
        """Read the plan again: parts and tasks that were written since join. Raises PlanRefused where one that is known
        has another content now; then everything stays as it was."""
        refresh(self)

    def set_level(self, level: str | Level) -> None:
        """Change how much is done on demand, with the next call; to ``off`` loads everything and keeps it."""
        set_level(self, Level(level))

    def set_memory(self, memory: str | int) -> None:
        """Have other bytes for all parts; with fewer, idle parts leave at once, and those in use when they are idle."""
        self.has_limit = True
        with self.residency.lock:
            self.residency.guard.set_allowance(parse_bytes(memory) if isinstance(memory, str) else memory)
        while self.sweep():
            pass

    def keep_within(self, memory: int, wait: float) -> None:
        """Have other bytes, as `set_memory`, and return once no more are taken; waits ``wait`` seconds for calls.

        Raises PartTooLarge where what is pinned takes more, or what at this level leaves by hand only, and InUse where
        calls go on; then they have as many bytes as before.
        """
        keep_within(self.residency, memory, wait)
        self.has_limit = True

    def sweep(self) -> int:
        """Let idle parts go as the guard says: one pass; returns how many went."""
        return self.residency.sweep()

    def report(self) -> PartsReport:
        """Say how every part is. Loads nothing and waits for nobody's load or call."""
        home, now = self.residency, self._clock()
        with home.lock:
            stands = {by: part for part, by in home.standing.items() if by != part}
            parts = tuple(report_of(one, home.guard, stands.get(one.name), now) for one in home.groups.values())
            guard = home.guard
            return PartsReport(
                home.level.value,
                self.digest,
                guard.allowance,
                guard.owned,
                home.line.waiting,
                parts,
                guard.report(now),
            )

    def still(self) -> Still:
        """Return, for a ``with``, all of the model as it is at its beginning: what is there stays until its end."""
        return Still(self.residency)

    def cast(self, fn: Cast) -> None:
        """Do to every tensor what `Module.to` does; raises PartsBusy while calls run, ModelUnsuited."""
        cast_all(self, fn)

    def close(self) -> None:
        """Let everything go that is not in use, and the folder. Idempotent; calls that need a part fail afterwards."""
        if self._closed:
            return
        self._closed = True
        if self._sweeper is not None:
            self._sweeper.close()
        for name in self.residency.groups:
            with self.residency.lock:
                self.residency.guard.pin(name, False)
            self.residency.unload(name)
        self.root.close()

    # ── inside ──────────────────────────────────────────────────────────────────────────────────────

    def _acquire(
        self, task: str, who: str, wait: float, held: Lease | None, wanted: Wanted = is_wanted
    ) -> tuple[Group, ...]:
        if held is not None:  # waiting with a lease for what it keeps would be waiting for oneself
            groups = held.groups
            if self.residency.share(groups):
                return groups
        return self.residency.acquire(self.plan.tasks[task].parts, task, who, wait, wanted=wanted)

    def _select(self, task: str, groups: Sequence[Group]) -> Selection:
        """Return the adapters of a task's own parts, in the task's order; a lease may have others, too."""
        order = {name: place for place, name in enumerate(self.plan.tasks[task].parts)}
        found: list[tuple[int, Adapter]] = []
        for group in groups:
            adapter = group.held.adapter if group.held is not None else None
            place = next((order[name] for name in chain_of(self.plan, group.part) if name in order), None)
            if adapter is not None and place is not None:
                found.append((place, adapter))
        return Selection(self.owner, task, [adapter for _, adapter in sorted(found, key=lambda one: one[0])])

    def _task(self, task: str | None) -> str:
        if task is not None:
            return self.plan.task(task).name
        if len(self.plan.tasks) == 1:
            return next(iter(self.plan.tasks))
        raise TaskUnclear(list(self.plan.tasks), [])

    def standing(self, part: str) -> str:
        """Return the part that serves in a part's place now: itself, unless it was replaced. Raises UnknownPart."""
        name = self.plan.part(part).name
        return self.residency.standing.get(name, name)

    def _whole_for(self, task: str) -> list[str]:
        """Return the parts of all tasks, the task's own first; of those that cannot be there together, the first."""
        names = list(dict.fromkeys((*self.plan.tasks[task].parts, *self.parts_of_tasks())))
        with self.residency.lock:
            groups = self.residency.now(names)
        found: list[str] = []
        taken: set[str] = set()
        for name, group in zip(names, groups, strict=True):
            if not taken.intersection((group.name, *group.rivals)):
                found.append(name)
                taken.add(group.name)
        return found

    def parts_of_tasks(self) -> list[str]:
        """Return the parts that any task names."""
        return list(dict.fromkeys(name for task in self.plan.tasks.values() for name in task.parts))
