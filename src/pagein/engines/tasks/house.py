"""One split model in a worker: who gets which lease, how much memory there is, and what an operator wants of it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch

from pagein.engines.local.compute import hand_over
from pagein.engines.local.fields import refuse
from pagein.engines.local.memory import give_back_now
from pagein.engines.tasks.book import TaskBook
from pagein.errors import InUse, PartTooLarge
from pagein.parts.lease import Lease
from pagein.parts.report import PartReport
from pagein.parts.rollout import Level, Rollout, Route
from pagein.parts.runtime import Parts
from pagein.units import format_bytes

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Guest:
    """Whose request one is."""

    key: str
    """By which it takes part in the roll-out."""
    who: str
    """As the audit line names the caller."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the worker may take of one pool."""

    pool: str
    allowance: int | None
    """Bytes; None where nobody bounds them."""
    beside: int
    """Bytes of it that no part gets: caches and activations of requests, and the process."""

    @property
    def for_parts(self) -> int | None:
        """Bytes that parts get."""
        return None if self.allowance is None else max(self.allowance - self.beside, 0)

    def refusal(self, error: PartTooLarge) -> PartTooLarge:
        """Return the same in bytes of the whole allowance."""
        assert self.allowance is not None
        need: Any = error.details["need_bytes"]
        found = PartTooLarge(str(error.details["part"]), need, self.for_parts or 0, self.allowance)
        found.hint = (
            f"{format_bytes(self.beside)} are for caches, activations and the process: raise `memory` of this model, "
            f"or lower its `context` or `parallel`"
        )
        return found


class House:
    """Implements `pagein.engines.local.parts.Parted` and `pagein.engines.local.allowance.Adjustable`.

    What may take long is done in a thread of its own, never on the event loop and never in one that computes.
    """

    def __init__(
        self, parts: Parts, rollout: Rollout, memory: Memory, wait: float, make_book: Callable[[], TaskBook]
    ) -> None:
        """``wait``: seconds that a lower allowance waits for calls; ``make_book`` reads the tasks of the plan."""
        self.parts, self.book = parts, make_book()
        self._rollout, self._memory, self._wait, self._make_book = rollout, memory, wait, make_book
        self._changing = threading.Lock()

    @property
    def pool(self) -> str:
        """The pool that parts are in."""
        return self._memory.pool

    def lease(self, task: str, guest: Guest, wanted: Callable[[], bool]) -> Lease:
        """Return the lease of a request: on its task's parts, or on all where it does not take part in the roll-out."""
        whole = self._rollout.route(guest.key) is Route.WHOLE
        return self.parts.lease(task, whole=whole, who=guest.who, wanted=wanted)

    # ── memory ──────────────────────────────────────────────────────────────────────────────────────

    async def set_allowance(self, count: int) -> dict[str, object]:
        """Let idle parts go until all fit into other bytes; waits for calls within bounds."""
        return await _beside(lambda: self._keep_to(count))

    def _keep_to(self, count: int) -> dict[str, object]:
        wished, beside = replace(self._memory, allowance=count), self._memory.beside
        with self._changing:
            try:
                self.parts.keep_within(wished.for_parts or 0, self._wait)
            except PartTooLarge as error:
                raise wished.refusal(error) from error
            self._memory = wished
        self._give_back()
        report = self.parts.report()
        there = [one for one in report.parts if one.state == "hot"]
        line = (
            f"{len(there)} of {len(report.parts)} parts in {format_bytes(report.owned)} of "
            f"{format_bytes(report.allowance)}, {format_bytes(beside)} for caches, activations and the process"
        )
        print(f"allowance is now {format_bytes(count)} of {self.pool}: {line}", flush=True)
        return {"total": report.owned + beside, "resident": len(there), "parts": len(report.parts), "plan": [line]}

    def _give_back(self) -> None:
        """Return to the system, or to the device, what the allocators keep of parts that have gone."""
        give_back_now()
        if self.parts.seats.device.type == "cuda":
            torch.cuda.empty_cache()

    # ── parts ───────────────────────────────────────────────────────────────────────────────────────

    def parts_report(self, after: int) -> dict[str, object]:
        """Return everything about the parts; takes the lock that no load and no call holds for long."""
        report = self.parts.report()
        return {
            "level": report.level,
            "percent": self._rollout.percent,
            "allowance": report.allowance,
            "owned": report.owned,
            "waiting": report.waiting,
            "plan": report.plan,
            "thrash": asdict(report.thrash),
            "tasks": self.book.listing(),
            "parts": [_part(one) for one in report.parts],
            "events": [asdict(event) for event in self.parts.events.after(after)],
        }

    async def load(self, part: str) -> None:
        """Bring a part in."""
        await _beside(lambda: self.parts.load(part, who="operator"))

    async def unload(self, part: str) -> None:
        """Let a part go; raises InUse."""
        await _beside(lambda: self._unload(part))

    def _unload(self, part: str) -> None:
        name = self.parts.standing(part)
        if self.parts.unload(part):
            self._give_back()
            return
        found = next(one for one in self.parts.report().parts if one.part == name)
        if found.bytes:
            why = _why_it_stays(found)
            raise InUse(f"part {name!r} of {format_bytes(found.bytes)} {why}", part=name, leases=found.leases)

    async def pin(self, part: str, pinned: bool) -> None:
        """Keep a part, or no longer."""
        await _beside(lambda: self.parts.pin(part, pinned))

    async def replace(self, part: str, by: str) -> None:
        """Let a part stand in another's place, once it is proven."""
        await _beside(lambda: self.parts.replace(part, by, who="operator"))

    async def refresh(self) -> None:
        """Read the plan again; its new tasks are served with the next request."""

        def act() -> None:
            with self._changing:
                self.parts.refresh()
                self.book = self._make_book()

        await _beside(act)

    async def roll_out(self, level: str | None, percent: float | None) -> None:
        """Change the roll-out with the next request; to level off everything is loaded first."""
        if level is not None and level not in list(Level):
            refuse("rollout", f"level is {level[:80]!r}; it must be one of {', '.join(Level)}")

        def act() -> None:
            with self._changing:
                now = self._rollout
                new = Rollout(now.level if level is None else Level(level), now.percent if percent is None else percent)
                if level is not None:
                    self.parts.set_level(new.level)
                self._rollout = new

        await _beside(act)


async def _beside(work: Callable[[], T]) -> T:
    """Do something in a thread of its own, so that it keeps nobody from the threads that all share."""
    return (await hand_over(lambda _: work(), _start_thread)).value


def _start_thread(job: Callable[[], None]) -> None:
    threading.Thread(target=job, name="parts", daemon=True).start()


def _why_it_stays(part: PartReport) -> str:
    if part.leases:
        return f"is in use by {part.leases} calls"
    return "is pinned" if part.pinned else f"is {part.state}"


def _part(one: PartReport) -> dict[str, object]:
    body = asdict(one)
    return {"name": body.pop("part"), **body}
