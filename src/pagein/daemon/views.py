"""The state as the gateway shows it: reads, never changes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

from pagein import __version__
from pagein.catalog.model import ModelEntry, NeedSource
from pagein.catalog.resolve import describe_peak
from pagein.daemon.fleet import Fleet
from pagein.daemon.inbox import Inbox
from pagein.daemon.meter import Meter
from pagein.daemon.parts_watch import PartsWatch
from pagein.daemon.roster import Roster
from pagein.gateway.ports import ModelView, PlannedEviction, PlanView, PoolView, RoomView, StatusView
from pagein.memory.budget import PoolBudget
from pagein.residency.lifecycle import State
from pagein.scheduler import ModelState
from pagein.scheduler.dry_run import foresee
from pagein.scheduler.state import DAEMON, left_of
from pagein.units import format_bytes


class View:
    """Builds the values of `pagein.gateway.ports` from scheduler, meter and catalog."""

    def __init__(
        self,
        roster: Roster,
        budgets: dict[str, PoolBudget],
        inbox: Inbox,
        meter: Meter,
        fleet: Fleet,
        limits: str = "",
        parts: PartsWatch | None = None,
    ) -> None:
        self._roster, self._budgets, self._limits, self._parts = roster, budgets, limits, parts
        self._state = inbox.scheduler.state
        self._meter, self._fleet = meter, fleet
        self._began = time.monotonic()
        self.address = ""

    def status(self, rooms: list[RoomView]) -> StatusView:
        """The whole daemon at this moment."""
        return StatusView(
            version=__version__,
            pid=os.getpid(),
            address=self.address,
            state="stopping" if self._state.stopping else "running",
            uptime_seconds=time.monotonic() - self._began,
            pools=[self._pool(name) for name in self._state.ledgers],
            models=[self._model(model) for model in self._state.models.values()],
            pressure=self._state.pressure.level.value,
            pressure_signs=list(self._state.pressure.signs),
            limits=self._limits,
            rooms=rooms,
        )

    def _pool(self, name: str) -> PoolView:
        ledger = self._state.ledgers[name]
        totals, own = ledger.totals(), ledger.bytes_of(DAEMON)
        outside = sum(ledger.bytes_of(room) for room in self._state.rooms)
        left = sum(ledger.bytes_of(left_of(model)) for model in self._state.models)
        workers = sum(self._meter.last(model).get(name, 0) for model in self._state.models)
        own_measured = self._meter.daemon_bytes if name == "ram" else 0
        return PoolView(
            name=name,
            budget=ledger.budget,
            own=own,
            reserved=totals.reserved,
            resident=totals.resident - own - outside - left,
            releasing=totals.releasing,
            free=totals.free,
            measured=workers + own_measured if own_measured is not None else None,
            highest_measured=self._meter.highest.get(name),
            available=self._state.available.get(name),
            source=self._budgets[name].source,
            effective=self._state.effective(name) if self._state.available.get(name) is not None else None,
            outside=outside,
            left=left,
        )

    def _model(self, model: ModelState) -> ModelView:
        entry, now = self._roster.entries[model.name], time.monotonic()
        ready = self._fleet.ready(model.name)
        last_ready = self._fleet.last_ready(model.name)
        said = last_ready.capabilities if last_ready is not None else entry.capabilities
        split = self._parts.capabilities(model.name) if self._parts is not None else None
        retry = model.retry_at - now if model.retry_at is not None else None
        problem = model.problem
        if problem is None and model.state is State.FAILED and model.error is not None:
            problem = model.error.message
        present = model.state in (State.RESIDENT, State.DRAINING, State.ASLEEP)
        return ModelView(
            name=model.name,
            engine=entry.engine,
            engine_version=last_ready.engine_version if last_ready is not None else entry.engine_version,
            capabilities=sorted(capability.value for capability in (said if split is None else split)),
            state=model.state.value,
            priority=model.priority,
            pinned=model.pinned,
            device=entry.device,
            context=ready.context if ready is not None else entry.context,
            need=dict(model.need),
            need_source=model.need_source,
            need_explanation=_why_needed(model, entry, self._meter.peak(model.name)),
            estimate=dict(entry.estimate.bytes),
            held=self._state.held(model.name),
            measured=dict(self._meter.last(model.name)) or None,
            peak=self._meter.peak(model.name),
            leases=self._state.leases.count(model.name),
            waiting=len(model.waiting),
            uses=model.uses,
            loads=model.loads,
            idle_seconds=now - model.last_used if present and not self._state.busy(model.name) else None,
            load_seconds=model.load_seconds,
            pid=self._fleet.pid(model.name),
            last_reason=model.last_reason,
            problem=problem,
            retry_in_seconds=retry if retry is not None and retry > 0 else None,
            parts=self._parts.view(model.name) if self._parts is not None else None,
        )

    def plan(self, name: str) -> PlanView:
        """What would happen if the model were asked for now."""
        model, now = self._state.models[name], time.monotonic()
        free = {pool: self._state.free(pool) for pool in model.need if pool in self._state.ledgers}
        seen = foresee(self._state, model, now)
        evictions = [PlannedEviction(v.name, dict(v.bytes), v.describe()) for v in seen.victims]
        return PlanView(name, seen.outcome, dict(model.need), free, evictions, seen.reason)


def _why_needed(model: ModelState, entry: ModelEntry, peak: Mapping[str, int] | None) -> str:
    """The numbers behind what it needs now: the catalog's, or what was learned of it since that was read."""
    if model.usual_need is not None:
        usual = " and ".join(f"{format_bytes(count)} of {pool}" for pool, count in model.usual_need.items())
        return f"set until it is unloaded; then {usual}: {entry.need.explanation}"
    if model.need == entry.need.bytes and model.need_source == entry.need.source:
        return entry.need.explanation
    if model.need_source == NeedSource.MEASURED and peak:
        return f"highest of what was measured: {describe_peak(peak)}"
    return f"it outgrew what it was granted, which was {entry.need.source.value}: {entry.need.explanation}"
