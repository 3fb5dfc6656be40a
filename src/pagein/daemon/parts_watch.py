"""Looks at the parts of split models: asks their workers every few seconds, remembers and journals what they tell.

A look never loads, never waits for a load or a call, and is bounded: whoever does not answer in time is shown as it
was, with the age of that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from pagein.catalog.split.facts import TaskFacts
from pagein.daemon.fleet import Fleet
from pagein.daemon.journal import Journal
from pagein.daemon.parts_report import Report, absent_view, left_view, read_report
from pagein.daemon.parts_worker import NoAnswer, ask
from pagein.daemon.rollouts import Rollout, Rollouts
from pagein.daemon.roster import Roster
from pagein.errors import PageinError
from pagein.gateway.parts_ports import PartsView
from pagein.protocol import Capability, Endpoint
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Renewed

_log = logging.getLogger("pagein.parts")

EVERY = 2.0
"""Seconds between two looks."""
PATIENCE = 1.0
"""Seconds that a look waits for each worker."""
MOST_AT_ONCE = 20
"""Events of one look that are told one by one: parts that thrash must not fill the log."""


@dataclass(slots=True)
class _Told:
    """What the newest worker of a model told last."""

    endpoint: Endpoint
    view: PartsView
    tasks: Mapping[str, TaskFacts]
    asked: float
    """When it was like that; monotonic seconds."""
    seq: int = field(default=0)
    """Of the last event that was taken in."""


class PartsWatch:
    """What is known of all parts; a listener of the inbox that belongs to the event loop's thread."""

    def __init__(self, roster: Roster, fleet: Fleet, journal: Journal, rollouts: Rollouts) -> None:
        self._roster, self._fleet, self._journal, self._rollouts = roster, fleet, journal, rollouts
        self._told: dict[str, _Told] = {}
        self._adopted: set[str] = set()
        """Models whose workers were taken over and have not told yet what became of them under the earlier daemon."""
        self._soon = asyncio.Event()

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Look at a worker as soon as it is there, and forget what an edited configuration makes untrue."""
        if isinstance(event, ev.BecameReady | ev.Adopted) and self._is_split(event.model):
            if isinstance(event, ev.Adopted):
                self._adopted.add(event.model)
            else:
                self._adopted.discard(event.model)  # a worker of this daemon's own comes after it
            self._soon.set()
        for action in actions:
            if isinstance(action, Renewed) and not action.lives:
                self._told.pop(action.model, None)
                if action.removed:
                    self._rollouts.forget(action.model)

    # ── looking ─────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> None:
        """Look for ever."""
        while True:
            self._soon.clear()
            await self.look(self.names(), PATIENCE)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._soon.wait(), EVERY)

    async def look(self, names: Iterable[str], patience: float) -> None:
        """Ask the workers of these models all at once; never raises, and waits no longer than ``patience``."""
        live = [(name, ready.endpoint) for name in names if (ready := self._fleet.ready(name)) is not None]
        await asyncio.gather(*(self._look_at(name, endpoint, patience) for name, endpoint in live))

    async def look_again(self, name: str) -> None:
        """Ask the worker of a split model whose state was just changed by hand; of another model nothing."""
        if self._is_split(name):
            await self.look([name], PATIENCE)

    async def _look_at(self, name: str, endpoint: Endpoint, patience: float) -> None:
        try:
            await self.tell(name, endpoint, None, patience)
        except (NoAnswer, PageinError) as error:
            _log.debug("the parts of %s: %s", name, error)
        except Exception:  # a fault of one look must not end the watch
            _log.exception("looking at the parts of %s failed", name)

    async def tell(
        self, name: str, endpoint: Endpoint, wish: Mapping[str, object] | None, patience: float
    ) -> PartsView:
        """Have a worker do something, or without a wish show its parts, and take in what it tells; raises as `ask`."""
        asked, known = time.monotonic(), self._told.get(name)
        after = known.seq if known is not None and known.endpoint == endpoint else 0
        report = read_report(await ask(endpoint, wish, after, patience))
        if wish is not None:
            asked = time.monotonic()  # what it shows is how they are after the wish, which may have taken long
        self._take_in(name, endpoint, report, asked)
        return report.view

    def _take_in(self, name: str, endpoint: Endpoint, report: Report, asked: float) -> None:
        ready = self._fleet.ready(name)
        if ready is None or ready.endpoint != endpoint or not self._is_split(name):
            return  # it left meanwhile
        told = self._told.get(name)
        if told is None or told.endpoint != endpoint:
            told = self._told[name] = _Told(endpoint, report.view, report.tasks, asked)
        elif told.asked <= asked:  # an answer that another one has overtaken has nothing new but for its events
            told.view, told.tasks, told.asked = report.view, report.tasks, asked
        if name in self._adopted:
            self._adopted.discard(name)
            self._rollouts.remember(name, Rollout(report.view.level, report.view.percent))
            told.seq = max((event.seq for event in report.events), default=0)  # the earlier daemon's log has them
        self._record(name, told, report)

    def _record(self, name: str, told: _Told, report: Report) -> None:
        """Tell the journal what is new; of very much at once the last of it, and how much there was before."""
        fresh = [event for event in report.events if event.seq > told.seq]
        if not fresh:
            return
        shown = fresh[-MOST_AT_ONCE:]
        before = shown[0].seq - told.seq - 1
        told.seq = shown[-1].seq
        if before > 0:
            self._journal.record("part", name, f"{before} events of its parts came before these, too many to list")
        for event in shown:
            self._journal.record("part", name, event.describe(), data=event.data())

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def names(self) -> list[str]:
        """The split models, in the order of the configuration."""
        return [name for name in self._roster.entries if self._is_split(name)]

    def view(self, name: str) -> PartsView | None:
        """A split model's parts as they were last seen, all absent where it has no worker; None for other models."""
        entry = self._roster.entries[name]
        if entry.split is None:
            return None
        told, ready = self._told.get(name), self._fleet.ready(name)
        if told is not None and ready is not None and ready.endpoint == told.endpoint:
            return replace(told.view, age_seconds=time.monotonic() - told.asked)
        rollout = self._rollouts.of(name)
        if told is not None:
            return left_view(told.view, rollout.level, rollout.percent)
        return absent_view(entry.split, rollout.level, rollout.percent, entry.options.get("precision"))

    def tasks(self, name: str) -> Mapping[str, TaskFacts] | None:
        """What a split model can be asked for: once it was loaded, what its worker said, also after it went."""
        entry = self._roster.entries.get(name)
        if entry is None or entry.split is None:
            return None
        told = self._told.get(name)
        return told.tasks if told is not None else entry.split.tasks

    def capabilities(self, name: str) -> frozenset[Capability] | None:
        """What the tasks of a split model do, those that joined it included; None for other models."""
        tasks = self.tasks(name)
        return None if tasks is None else frozenset().union(*(one.capabilities for one in tasks.values()))

    def _is_split(self, name: str) -> bool:
        entry = self._roster.entries.get(name)
        return entry is not None and entry.split is not None
