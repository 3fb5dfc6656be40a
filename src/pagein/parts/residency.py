"""All parts of one model in a process: takes them for calls, brings them in, lets them go. Any thread may call it.

A call takes all of its parts or none, in the order of the plan:

1. all are there → one hold of the lock, and it computes
2. else it stands in one line with the others that lack something. Only the first of the line takes memory: it keeps
   what it has taken and waits for calls that lack nothing, so that no two can wait for each other
3. it leaves the line once the memory of all its parts is reserved; files are read outside the lock, each by one call,
   while the others that need it wait for that one

A part that is used by anyone never leaves. Where someone holds its tensors beside all leases (a list of parameters, a
graph of autograd, an exception's frames), that counts as a use until they let go.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from pagein.errors import PageinError, PartRefused, PartsBusy
from pagein.parts.deferring import DeferringLock
from pagein.parts.events import PartEventKind, PartEvents
from pagein.parts.files.audit import LOADED, Audit, no_audit
from pagein.parts.files.part_file import PartBytes, PartReader
from pagein.parts.groups import Claim, Group, State
from pagein.parts.guard import Guard
from pagein.parts.line import Line, Wanted, is_wanted
from pagein.parts.order import Order
from pagein.parts.publish import Held, Seats
from pagein.parts.rollout import Level


class Residency:
    """The parts of one model, their memory and their leases."""

    def __init__(
        self,
        groups: dict[str, Group],
        seats: Seats,
        guard: Guard,
        reader: PartReader,
        lock: DeferringLock,
        order: Order,
        clock: Callable[[], float],
        *,
        level: Level = Level.AUTO,
        audit: Audit = no_audit,
        patience: float = 0.25,
    ) -> None:
        """``patience``: seconds that the first of the line waits before others give way to it."""
        self.groups, self.seats, self.guard, self.reader = groups, seats, guard, reader
        self.lock, self.order, self.clock, self.level, self.audit = lock, order, clock, level, audit
        self.events = PartEvents()
        self.standing: dict[str, str] = {}
        """For parts that were replaced, which one stands in their place."""
        self.room = threading.Condition(lock)  # type: ignore[arg-type]
        self.line = Line(self, patience)

    # ── for calls ───────────────────────────────────────────────────────────────────────────────────

    def acquire(
        self,
        names: Sequence[str],
        task: str | None,
        who: str,
        wait: float,
        *,
        by_hand: bool = False,
        wanted: Wanted = is_wanted,
    ) -> tuple[Group, ...]:
        """Take a lease on each part and return them, all in memory; `release` them once.

        Blocks on the disk and for memory, ``wait`` seconds at most and no longer than it is ``wanted``. Raises
        PartRefused, PartsBusy, PartsThrash, PartTooLarge, PartAway; then nothing is held.
        """
        with self.lock:
            groups = self.now(names)
            if self.line.is_free(groups):
                self.take(groups)
                return groups
        ends = self.clock() + wait
        while True:
            try:
                groups, mine = self.line.enter(names, ends, wait, by_hand, wanted)
            except PageinError as error:
                self.events.add(PartEventKind.REFUSE, _part_of(error, names), task=task, reason=error.message)
                raise
            try:
                for group in mine:
                    self._load(group, task, who)
                whole = all(self._await(group, ends, wait) for group in groups)
            except BaseException as error:
                self._abandon(groups, mine)
                if isinstance(error, PartRefused) and self._fall_back(groups):
                    continue
                raise
            if whole:
                return groups
            self.release(groups)

    def share(self, groups: Sequence[Group]) -> bool:
        """Take another lease on what the caller holds a lease on; never waits. False where that has just ended."""
        with self.lock:
            able = bool(groups) and all(one.state is State.HOT and one.leases for one in groups)
            if able:
                self.take(groups)
            return able

    def release(self, groups: Sequence[Group]) -> None:
        """End a lease; never waits."""
        for group in groups:
            self.order.used(group.name)  # here, where the thread's stream is the call's
        self.lock.soon(partial(self.give_back, groups))

    # ── for the operator and the guard ──────────────────────────────────────────────────────────────

    def unload(self, name: str) -> bool:
        """Let a part go; False where it is in use, pinned, or someone holds its tensors. Never waits for calls."""
        with self.lock:
            group = self.groups[name]
            return self.can_leave(group) and self.evict(group, "unloaded by hand")

    def sweep(self) -> int:
        """Let those parts go that the guard names, and return how many went: one pass."""
        with self.lock:
            return self.sweep_once() if self.level is Level.AUTO else 0

    def exclusively(self, act: Callable[[], None], wait: float) -> None:
        """Run ``act`` under the lock while no call runs and none begins; raises PartsBusy."""
        self.line.alone(act, self.clock() + wait, wait)

    def replace(self, part: str, by: str) -> str:
        """Let every call from now on use another part in a part's place; returns the one that stood there."""
        with self.lock:
            before = self.standing.get(part, part)
            self.standing[part] = by
            if self.guard.is_pinned(before):
                self.guard.pin(before, False)
                self.guard.pin(by)
            if before != by:
                self.events.add(
                    PartEventKind.REPLACE, part, reason=f"{by!r} stands in its place, before it was {before!r}"
                )
            return before

    # ── under the lock ──────────────────────────────────────────────────────────────────────────────

    def now(self, names: Iterable[str]) -> tuple[Group, ...]:
        """Return the groups that stand for these parts now."""
        return tuple(self.groups[self.standing.get(name, name)] for name in names)

    def can_leave(self, group: Group) -> bool:
        """Tell whether a part could be let go of now."""
        return group.state is State.HOT and group.leases == 0 and not self.guard.is_pinned(group.name)

    def take(self, groups: Iterable[Group]) -> None:
        """Count one more use of each."""
        now = self.clock()
        for group in groups:
            group.leases += 1
            self.guard.take(group.name, now)

    def evict(self, group: Group, reason: str) -> bool:
        """Let a part go that can leave, and return whether it went. Without the lock while memory is given back."""
        assert group.state is State.HOT, group.state
        assert group.leases == 0, f"{group.name} has {group.leases} leases"
        held = group.held
        assert held is not None, group.name
        group.held = None
        self.seats.withdraw(group.part, group.entry, group.tasks, group.cast_types)
        data, anchor = held.data, held.anchor
        held.adapter = None
        looks_in = anchor() if anchor is not None else None
        if data is not None and looks_in is not None:
            self._keep(group, data, looks_in)
            return False
        nbytes = self.guard.bytes_of(group.name)
        self.guard.begin_eviction(group.name)
        group.state = State.DRAINING
        self.lock.release()
        try:
            self.order.wait(group.name)
            held = None
            if data is not None:
                data.close()
        finally:
            self.lock.acquire()
            self.guard.finish_eviction(group.name, self.clock())
            group.state = State.COLD
            group.evictions += 1
            self.events.add(PartEventKind.EVICT, group.name, nbytes=nbytes, reason=reason)
            group.changed.notify_all()
            self.room.notify_all()
        return True

    def sweep_once(self) -> int:
        """Let those parts go that the guard names now; returns how many went."""
        named = self.guard.plan_pass(self.clock())
        able = [(self.groups[one.part], one.reason) for one in named]
        return sum(self.can_leave(group) and self.evict(group, reason) for group, reason in able)

    def cancel(self, claim: Claim) -> None:
        """Give the reserved memory of a load back that came to nothing."""
        if not claim.settled:
            claim.settled = True
            claim.group.owed = False
            self.guard.cancel(claim.group.name)
            self.room.notify_all()

    def _keep(self, group: Group, data: PartBytes, looks_in: memoryview) -> None:
        """Hang a part again whose tensors someone holds: its memory cannot be had, and must not be taken from them."""
        held = self.seats.prepare(group.part, data)
        self.seats.publish(held)
        group.held = held
        self.take([group])
        group.outside = weakref.ref(looks_in, lambda _: self.lock.soon(partial(self._let_go, group)))

    def _let_go(self, group: Group) -> None:
        group.outside = None
        self.give_back([group])

    def give_back(self, groups: Iterable[Group]) -> None:
        """Count one use of each less."""
        now = self.clock()
        for group in groups:
            assert group.leases > 0, group.name
            group.leases -= 1
            group.used_at = now
            self.guard.end(group.name, now)
        self.room.notify_all()

    # ── loading ─────────────────────────────────────────────────────────────────────────────────────

    def _load(self, group: Group, task: str | None, who: str) -> None:
        """Bring a part in whose memory is reserved; on return it is hot. Holds no lock while it reads."""
        began = self.clock()
        claim = Claim(group)
        try:
            data, held = self._read(group, task, who, claim)
        except BaseException as error:
            with self.lock:
                if not claim.handed:
                    self.cancel(claim)
                group.owed = not claim.settled
                if not isinstance(error, Exception):
                    group.state = State.COLD
                    group.changed.notify_all()
                else:
                    group.fail(error, self.clock(), lasting=isinstance(error, PartRefused))
                    self.events.add(PartEventKind.REFUSE, group.name, task=task, reason=group.last_error)
            raise
        with self.lock:
            claim.settled = True
            self.seats.publish(held)
            group.held, group.state, group.error, group.failures = held, State.HOT, None, 0
            group.loads += 1
            now = self.clock()
            group.seconds = now - began
            self.guard.confirm(group.name, now, now - began, held.nbytes)
            reason = f"for {who}" if who else None
            self.events.add(
                PartEventKind.LOAD, group.name, task=task, nbytes=held.nbytes, seconds=now - began, reason=reason
            )
            group.changed.notify_all()
            self.room.notify_all()
        if held.data is None:
            data.close()
        self.audit(data.line(LOADED))

    def _read(self, group: Group, task: str | None, who: str, claim: Claim) -> tuple[PartBytes, Held]:
        def reserve(nbytes: int) -> Callable[[], None]:
            claim.handed = True
            return lambda: self.lock.soon(partial(self.cancel, claim))

        data = self.reader.read(task, group.name, group.precision, reserve, who)
        try:
            held = self.seats.prepare(group.part, data, group.cast)
            self.order.landed()
        except BaseException as error:
            if isinstance(error, PageinError):
                self.audit(data.line(error.code, error.message))
            data.close()
            with self.lock:
                self.cancel(claim)
            raise
        return data, held

    def _await(self, group: Group, ends: float, wait: float) -> bool:
        """Return whether a part is there, once its load has ended; False where it must be begun anew."""
        with self.lock:
            while group.state is State.LOADING:
                left = ends - self.clock()
                if left <= 0:
                    raise PartsBusy(
                        group.name, group.entry.nbytes, self.guard.totals().free, wait, "it is being loaded"
                    )
                group.changed.wait(left)
            if group.state is State.FAILED:
                raise group.retold()
            return group.state is State.HOT

    def _abandon(self, groups: Sequence[Group], mine: Sequence[Group]) -> None:
        """Give up a call that could not have all of its parts: loads that it has not begun are for others to begin."""
        with self.lock:
            for group in mine:
                if group.state is State.LOADING and not group.owed:
                    group.state = State.COLD
                    self.guard.cancel(group.name)
                    group.changed.notify_all()
            self.give_back(groups)

    def _fall_back(self, groups: Sequence[Group]) -> bool:
        """Let the part that was replaced serve on where its replacement turns out to be damaged."""
        with self.lock:
            bad = {group.name for group in groups if group.state is State.FAILED}
            back = [part for part, by in self.standing.items() if by in bad and by != part]
            for part in back:
                why = f"it serves on: {self.standing.pop(part)!r}, which stood in its place, cannot be loaded"
                self.events.add(PartEventKind.REPLACE, part, reason=why)
            return bool(back)


def _part_of(error: PageinError, names: Sequence[str]) -> str:
    """The part that an error names; of one that names none, the last that the call wanted."""
    named = error.details.get("part")
    return named if isinstance(named, str) else names[-1]
