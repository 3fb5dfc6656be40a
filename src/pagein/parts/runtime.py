"""`load_parts(path)`: an ordinary model whose tasks' weights come when a call needs them, and leave when idle."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pagein.catalog.split.plan import STORED, SplitPlan
from pagein.catalog.split.precision import Precisions, check_together, choose, extend
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import ModelUnsuited, PartRefused, PartsBusy, TaskUnclear
from pagein.parts.adapters import ACTIVE, Adapter, Owner, Selection
from pagein.parts.adapting import make_adaptable
from pagein.parts.building import Build, build_on_meta
from pagein.parts.deferring import DeferringLock
from pagein.parts.events import PartEventKind, PartEvents
from pagein.parts.face import give_face
from pagein.parts.files.audit import Audit, no_audit
from pagein.parts.files.check import verify
from pagein.parts.files.part_file import Limits, PartReader
from pagein.parts.files.proven import Proven
from pagein.parts.files.signing import Trust
from pagein.parts.groups import Group, groups_of, set_rivals
from pagein.parts.guard import Guard, GuardRules
from pagein.parts.lease import Lease, Stream, in_force
from pagein.parts.levels import set_level
from pagein.parts.line import Wanted, is_wanted
from pagein.parts.order import order_on
from pagein.parts.packed_layers import pack_layers
from pagein.parts.plan_facts import adapted_modules, chain_of, kind_of_device, room_for_all
from pagein.parts.publish import Cast, Seats
from pagein.parts.report import PartsReport, report_of
from pagein.parts.residency import Residency
from pagein.parts.rollout import Level
from pagein.parts.shrinking import keep_within
from pagein.parts.sweeper import Sweeper
from pagein.parts.tripwire import lay_tripwires
from pagein.parts.whole import Still, cast_all
from pagein.units import parse_bytes


def load_parts(
    path: str | Path,
    memory: str | int | None = None,
    *,
    device: str = "cpu",
    level: str | Level = Level.AUTO,
    precision: Precisions = STORED,
    trust: str | Path | None = None,
    build: Build | None = None,
    wait: float = 30.0,
    rules: GuardRules | None = None,
    limits: Limits | None = None,
    audit: Audit = no_audit,
    sweep_seconds: float | None = 5.0,
) -> Any:
    """Return the model of a split folder: transformers' own class (or what ``build`` makes), in eval mode.

    ``model(..., task=…)`` and ``model.generate(..., task=…)`` bring in what the task needs; ``with model.lease(task):``
    keeps it for longer. Without ``task`` a call inside a lease, or of a model with one task, works as ever.

    ``memory`` (bytes, or text like "4GiB"; default: all parts fit) is for the weights of all parts together.
    ``precision``: one for all parts that have it, one by part, or "auto" (`catalog.split.precision` has its rule).
    ``trust``: a public key (PEM); a split that it did not sign is refused before anything of it is used.
    ``wait``: seconds that a call waits for memory at most. ``sweep_seconds``: how often idle parts are looked for, None
    for never (`Parts.sweep`). Everything else of it is in ``model.pagein``, a `Parts`. Raises PlanRefused, PartRefused,
    PartTooLarge, ModelUnsuited, BadModelFile.
    """
    vouch: Callable[[PartsRoot], Callable[[bytes], None] | None]
    trusted = Trust(trust) if trust is not None else None
    vouch = trusted.vouch if trusted is not None else _no_question
    root = PartsRoot(Path(path))
    try:
        plan = read_plan(root, vouch(root))
        rules = rules or GuardRules()
        wanted = parse_bytes(memory) if isinstance(memory, str) else memory
        forms = choose(plan, precision, kind_of_device(torch.device(device)), wanted)
        check_together(plan, forms)
        model = build_on_meta(plan, root.folder, build)
        if trusted is not None:
            trusted.confirm(root, plan)
        guard = Guard(room_for_all(plan, forms, rules) if wanted is None else wanted, rules)
        proven = Proven() if Proven.available() else None
        reader = PartReader(root, plan, limits=limits, audit=audit, proven=proven)
        parts = Parts(model, root, reader, guard, torch.device(device), forms, precision, wait, audit)
        parts.vouch = vouch(root)
        parts.has_limit = wanted is not None
    except BaseException:
        root.close()
        raise
    try:
        parts.start(Level(level), sweep_seconds)
    except BaseException:
        parts.close()
        raise
    return model


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
        self._root, self._reader, self._precision, self._clock = root, reader, precision, clock
        weakref.finalize(self, root.close).atexit = False
        self._digest = reader.plan.digest
        self.vouch: Callable[[bytes], None] | None = None
        """Asked of every plan that is read again."""
        self.seats = Seats(model, reader.plan, device, pack_layers(model, reader.plan, forms))
        lock = DeferringLock()
        groups = self._groups(reader.plan, forms, lock)
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
        old, new = self.plan.part(part), self.plan.part(by)
        if old.name not in chain_of(self.plan, new):
            raise PartRefused(new.name, f"does not stand in the place of the part {old.name!r}")
        group = self.residency.groups[new.name]
        verify(self._root, group.entry)
        before = self.residency.replace(old.name, new.name)
        if before == new.name or not self.residency.guard.is_resident(before):
            return
        try:
            self.residency.release(self.residency.acquire([old.name], None, who, self.wait, by_hand=True))
        except PartsBusy:
            return  # a call with the old one goes on; the first call after it brings the new one in
        if self.residency.standing.get(old.name) != new.name:
            raise group.retold()
        self.residency.unload(before)

    def refresh(self) -> None:
        """Read the plan again: parts and tasks that were written since join. Raises PlanRefused where one that is known
        has another content now; then everything stays as it was."""
        plan = read_plan(self._root, self.vouch)
        known = self.residency.groups
        for name, part in plan.parts.items():
            if name in known and part.file(known[name].precision).sha256 != known[name].entry.sha256:
                raise PartRefused(name, "has another content now; a part that changes needs a name of its own")
        lock = self.residency.lock
        forms = extend(plan, {name: group.precision for name, group in known.items()}, self._precision)
        check_together(plan, forms)
        fresh = {name: one for name, one in self._groups(plan, forms, lock).items() if name not in known}
        with lock:
            make_adaptable(self.model, adapted_modules(plan), self.owner)
            for name, group in known.items():
                group.part = plan.parts.get(name, group.part)
            # Another refresh may have been faster: what it brought in stays.
            known.update({name: one for name, one in fresh.items() if name not in known})
            set_rivals(known.values(), self.seats)
            self._reader.plan, self._digest = plan, plan.digest
            if not self.has_limit:
                self.residency.guard.set_allowance(room_for_all(plan, forms, self.residency.guard.rules))
        if self.level is Level.OFF:
            self.set_level(Level.OFF)

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
                self._digest,
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
        self._root.close()

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

    def _groups(self, plan: SplitPlan, forms: Mapping[str, str], lock: DeferringLock) -> dict[str, Group]:
        groups = groups_of(plan.parts.values(), self.seats, lock, forms)
        set_rivals(groups.values(), self.seats)
        return groups


def _no_question(root: PartsRoot) -> None:
    """Where no key is trusted, no plan is asked for a signature."""
