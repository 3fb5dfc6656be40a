"""The daemon as the gateway sees it: asks the inbox, waits for the answer, shows the state."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from pagein.daemon.block_worker import headers_of, keeps_blocks
from pagein.daemon.fleet import Fleet
from pagein.daemon.inbox import Inbox
from pagein.daemon.journal import Journal
from pagein.daemon.keeper import Keeper
from pagein.daemon.parts_desk import SplitDesk
from pagein.daemon.parts_watch import PartsWatch
from pagein.daemon.reload import Reloader
from pagein.daemon.rollouts import Rollouts
from pagein.daemon.rooms import Rooms
from pagein.daemon.roster import Roster
from pagein.daemon.saved import Saved
from pagein.daemon.views import View
from pagein.errors import (
    CapabilityMissing,
    ConfigError,
    InUse,
    LoadFailed,
    ModelNotFound,
    Outgrown,
    PageinError,
    ShuttingDown,
    WaitTooLong,
    WorkerDied,
    WorkerHung,
    WorkerTimeout,
)
from pagein.gateway.ports import Decision, Lease, PlanView, Prepared, ReloadView, RoomView, StatusView
from pagein.history import TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import Capability
from pagein.residency.lifecycle import State
from pagein.scheduler import ModelState
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Grant, Refuse, Retain, Sleep, Stop, Wait
from pagein.sessions.tenant import tenant_of

WORKER_SILENT = WorkerTimeout.http_status
"""The status with which the gateway gives a lease back whose worker sent nothing for its time-out."""
EXIT_NOTICE = 2.0
"""Seconds that a broken connection waits for the news that the worker has ended."""


@dataclass(slots=True)
class _Ticket:
    """A request that waits for its lease."""

    model: str
    since: float
    loads: int
    """Loads of the model until then."""
    answer: asyncio.Future[None]
    on_wait: Callable[[str, int], None] | None
    evicted: list[str] = field(default_factory=list)


Lines = tuple[str, ...]
_Watchers = dict[str, list[asyncio.Future[Lines]]]
"""By model, the operators who wait for a load, an unload or a change of its allowance, whose result is the worker's new
plan; no entry is empty."""


class DaemonDesk:
    """Implements `pagein.gateway.ports.Desk`; a listener of the inbox that answers tickets."""

    def __init__(
        self,
        roster: Roster,
        inbox: Inbox,
        fleet: Fleet,
        journal: Journal,
        view: View,
        rooms: Rooms,
        parts: PartsWatch,
        rollouts: Rollouts,
        reloader: Reloader | None = None,
        keeper: Keeper | None = None,
    ) -> None:
        self._roster, self._rooms, self._reloader, self._keeper = roster, rooms, reloader, keeper
        self._inbox, self._fleet, self._journal, self._view, self._parts = inbox, fleet, journal, view, parts
        self.snapshots = Saved(keeper, roster) if keeper is not None else None
        self.split = SplitDesk(roster, inbox, fleet, parts, rollouts, self.load)
        self._ids = itertools.count(1)
        self._tickets: dict[int, _Ticket] = {}
        self._loads: _Watchers = {}
        self._unloads: _Watchers = {}
        self._resizes: _Watchers = {}
        self.drained = asyncio.Event()
        """Set while nobody holds a lease."""

    # ── answers ─────────────────────────────────────────────────────────────────────────────────

    def on_step(self, event: ev.Event, actions: list[Action]) -> None:
        """Answer tickets and operators."""
        for action in actions:
            match action:
                case Grant() if (ticket := self._tickets.get(action.request_id)) is not None:
                    _resolve(ticket.answer)
                case Refuse() if (ticket := self._tickets.get(action.request_id)) is not None:
                    _resolve(ticket.answer, action.error)
                case Wait() if (ticket := self._tickets.get(action.request_id)) is not None:
                    if ticket.on_wait is not None:
                        ticket.on_wait(action.reason, action.position)
                case Stop() | Sleep() if action.evicted_for is not None:
                    for ticket in self._tickets.values():
                        if ticket.model == action.evicted_for:
                            ticket.evicted.append(action.model)
                case Retain():
                    _resolve_all(self._resizes, action.model, action.error)
        self._answer_operators(event)
        if len(self._inbox.scheduler.state.leases):
            self.drained.clear()
        else:
            self.drained.set()

    def _answer_operators(self, event: ev.Event) -> None:
        match event:
            case ev.BecameReady():
                _resolve_all(self._loads, event.model)
            case ev.LoadBroke():
                _resolve_all(self._loads, event.model, event.error)
            case ev.Freed():
                _resolve_all(self._unloads, event.model)
            case ev.Resized():
                _resolve_all(self._resizes, event.model, event.error, event.plan)
            case ev.ShutdownWanted():
                for table in (self._loads, self._unloads, self._resizes):
                    for name in list(table):
                        _resolve_all(table, name, ShuttingDown("the daemon is stopping"))
        for table in (self._loads, self._unloads, self._resizes):
            for name in [n for n in table if n not in self._inbox.scheduler.state.models]:
                _resolve_all(table, name, ModelNotFound(name, self.names()))  # it went from the configuration
        for name in list(self._loads):
            model = self._model(name)
            if model.state is State.RESIDENT and not model.unload_wanted:
                _resolve_all(self._loads, name)
            elif model.wanted_since is None and model.state in (State.ABSENT, State.FAILED) and not model.waiting:
                error = model.error or LoadFailed(f"model {name!r} was not loaded: {model.last_reason}")
                _resolve_all(self._loads, name, error)
        for name in list(self._unloads):
            model = self._model(name)
            if model.state is State.RESIDENT and not model.unload_wanted:
                _resolve_all(self._unloads, name, InUse(f"model {name!r} stays: {model.last_reason}", model=name))

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    async def acquire(
        self,
        model: str,
        capability: Capability,
        on_wait: Callable[[str, int], None] | None = None,
        keep_alive: float | None = None,
    ) -> Lease:
        """Wait for a lease; see `Desk.acquire`."""
        offered = self.capabilities(model)
        if capability not in offered:
            raise CapabilityMissing(model, capability.value, [c.value for c in offered])
        request_id, since = next(self._ids), time.monotonic()
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        ticket = _Ticket(model, since, self._model(model).loads, answer, on_wait)
        self._tickets[request_id] = ticket
        try:
            self._inbox.post(ev.Requested(request_id, model, keep_alive))
            await answer
        except asyncio.CancelledError:
            self._inbox.post(ev.Finished(request_id, answered=False))
            raise
        finally:
            del self._tickets[request_id]
        return self._lease(request_id, ticket, capability)

    def _lease(self, request_id: int, ticket: _Ticket, capability: Capability) -> Lease:
        settings, model = self._roster.models[ticket.model], self._model(ticket.model)
        ready = self._fleet.ready(ticket.model)
        if ready is None:  # it died between the grant and now
            self._inbox.post(ev.Finished(request_id, answered=False))
            raise WorkerDied(f"the worker of {ticket.model!r} ended before it could serve: {model.last_reason}")
        return Lease(
            request_id=request_id,
            model=ticket.model,
            endpoint=ready.endpoint,
            context=ready.context,
            timeout=settings.timeout_for(capability),
            waited_seconds=time.monotonic() - ticket.since,
            load_seconds=model.load_seconds if model.loads > ticket.loads else None,
            evicted=tuple(ticket.evicted),
        )

    async def prepare(self, lease: Lease, path: str, body: bytes, turn: TurnOf | None = None) -> Prepared:
        """Bring back what was saved of a conversation; see `Desk.prepare`."""
        if self._keeper is None:
            ready, settings = self._fleet.ready(lease.model), self._roster.settings
            if not keeps_blocks(ready):
                return Prepared(body)
            tenant = tenant_of(settings.server.api_key, settings.state.salt)
            return Prepared(body, headers=headers_of(tenant, None))
        return await self._keeper.prepare(lease.model, path, body, turn)

    def account(self, lease: Lease, prepared: Prepared, counted: Counted | None, computed: bool = False) -> None:
        """Compare it with what the engine counted, and let `explain` tell it."""
        if self._keeper is None or (prepared.tokens is None and prepared.miss is None and not prepared.headers):
            return
        unused = self._keeper.account(lease.model, prepared, counted, computed)
        if prepared.headers:
            if counted is not None:
                restored, miss = counted.restored or 0, counted.miss
                data = {"restored": restored, "miss": (miss or "").partition(":")[0]}
                self._journal.record("state", lease.model, _told_by_worker(counted), lease.request_id, dict(data))
            return
        told = [unused or prepared.reason or f"nothing restored: {prepared.miss}"]
        if counted is not None:
            told.append(f"the engine computed {counted.computed} of {counted.prompt} tokens")
        data = {"restored": 0 if unused else prepared.restored, "miss": "unused" if unused else prepared.kind}
        self._journal.record("state", lease.model, "; ".join(told), lease.request_id, dict(data))

    def release(self, lease: Lease, status: int, seconds: float) -> None:
        """Give a lease back and write the model's log line."""
        self._fleet.log_use(lease.model, lease.request_id, status, seconds)
        self._inbox.post(ev.Finished(lease.request_id, answered=status < 400, silent=status == WORKER_SILENT))

    async def why_gone(self, lease: Lease) -> PageinError:
        """Explain a broken connection; waits up to `EXIT_NOTICE` for the worker's end to become known."""
        error = await self._fleet.why_ended(lease.model, lease.endpoint, EXIT_NOTICE)
        message = error.message if error is not None else "it closed the connection in the middle of an answer"
        told = f"the worker of {lease.model!r} did not finish: {message}"
        if isinstance(error, Outgrown | WorkerHung):
            return error.retold(told)
        details = {"model": lease.model, **(error.details if error is not None else {})}
        return WorkerDied(told, hint=error.hint if error is not None else None, **details)

    def last_lines(self, model: str) -> list[str]:
        """What its worker printed last; nothing where it is gone from the configuration."""
        return self._fleet.last_lines(model) if model in self._roster.entries else []

    # ── operators ───────────────────────────────────────────────────────────────────────────────

    async def load(self, model: str) -> None:
        """Load without using; see `Desk.load`."""
        state = self._model(model)
        if state.problem is not None:
            raise LoadFailed(f"model {model!r} cannot be served: {state.problem}")
        try:
            await self._bounded(self._loads, model, ev.LoadWanted(model))
        except (WaitTooLong, asyncio.CancelledError):
            if model not in self._loads:
                self._inbox.post(ev.LoadUnwanted(model))
            raise
        await self._parts.look_again(model)

    async def unload(self, model: str) -> None:
        """Unload and wait until its memory is back; see `Desk.unload`."""
        state = self._model(model)
        if state.pinned:
            raise InUse(f"model {model!r} is pinned", hint=f"`pagein unpin {model}` first", model=model)
        if state.state in (State.ABSENT, State.FAILED):
            self._inbox.post(ev.UnloadWanted(model))
            return
        await self._bounded(self._unloads, model, ev.UnloadWanted(model))

    async def set_allowance(self, model: str, count: int, pool: str | None = None) -> Lines:
        """Let a loaded model live with other bytes; see `Desk.set_allowance`."""
        self._model(model)
        if model in self._resizes:
            raise InUse(f"the allowance of {model!r} is being changed already", model=model)
        plan = await self._bounded(self._resizes, model, ev.ResizeWanted(model, count, pool))
        await self._parts.look_again(model)
        return plan

    def set_pin(self, model: str, pinned: bool) -> None:
        """Pin or unpin."""
        self._model(model)
        self._inbox.post(ev.PinChanged(model, pinned))

    async def take_room(
        self, pool: str, count: int, ttl: float | None, wait: float | None, pid: int | None, holder: str
    ) -> RoomView:
        """Give an outsider memory; see `Desk.take_room`."""
        bound = self._roster.settings.scheduler.max_wait
        return await self._rooms.take(pool, count, ttl, bound if wait is None else wait, pid, holder)

    def give_room_back(self, room: str) -> None:
        """End a lease of an outsider."""
        self._rooms.give_back(room)

    def extend_room(self, room: str, ttl: float | None) -> RoomView:
        """Count its time to live anew."""
        return self._rooms.extend(room, ttl)

    async def reload(self) -> ReloadView:
        """Apply the configuration as it is now; see `Desk.reload`."""
        if self._reloader is None:
            raise ConfigError("this daemon was started without a configuration file, so there is none to read again")
        return await self._reloader.reload()

    async def _bounded(self, table: _Watchers, model: str, wish: ev.Event) -> Lines:
        """Post a wish and wait until it came true; the watcher never outlives the wait."""
        if self._inbox.scheduler.state.stopping:
            raise ShuttingDown("the daemon is stopping")
        bound = self._roster.settings.scheduler.max_wait
        done: asyncio.Future[Lines] = asyncio.get_running_loop().create_future()
        table.setdefault(model, []).append(done)
        self._inbox.post(wish)
        try:
            return await asyncio.wait_for(done, bound)
        except TimeoutError:
            raise WaitTooLong(model, bound, self._model(model).last_reason) from None
        finally:
            watchers = table.get(model, [])
            if done in watchers:
                watchers.remove(done)
                if not watchers:
                    del table[model]

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def _model(self, name: str) -> ModelState:
        models = self._inbox.scheduler.state.models
        if name not in models:
            raise ModelNotFound(name, list(models))
        return models[name]

    def names(self) -> list[str]:
        """The configured models, in the order of the configuration."""
        return list(self._inbox.scheduler.state.models)

    def capabilities(self, model: str) -> frozenset[Capability]:
        """What a model offers; once it was loaded, what its worker said. See `Desk.capabilities`."""
        self._model(model)
        split, ready = self._parts.capabilities(model), self._fleet.last_ready(model)
        if split is not None:
            return split
        if ready is not None:
            return frozenset(ready.capabilities)
        entry = self._roster.entries[model]
        if not entry.capabilities and entry.problem is not None:
            raise LoadFailed(f"model {model!r} cannot be served: {entry.problem}")
        return entry.capabilities

    def status(self) -> StatusView:
        """Everything at this moment."""
        return self._view.status(self._rooms.views())

    def plan(self, model: str) -> PlanView:
        """Dry run on the live state."""
        self._model(model)
        return self._view.plan(model)

    def decisions(self, model: str | None = None, limit: int = 100) -> list[Decision]:
        """The last decisions, oldest first."""
        if model is not None:
            self._model(model)
        return self._journal.last(model, limit)

    def subscribe(self) -> AsyncIterator[Decision]:
        """Every decision from now on."""
        return self._journal.subscribe()

    def log_path(self, model: str) -> str:
        """Where the model's log is."""
        self._model(model)
        return str(self._fleet.log_path(model))


def _told_by_worker(counted: Counted) -> str:
    """What a worker that restores by itself made of a prompt, in words."""
    reused = f"reused {counted.cached} of {counted.prompt} tokens, {counted.restored or 0} of them brought back"
    return f"nothing reused: {counted.miss}" if counted.miss is not None and not counted.cached else reused


def _resolve(future: asyncio.Future[Any], error: PageinError | None = None, told: Lines | None = None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(told)
    else:
        future.set_exception(error)


def _resolve_all(table: _Watchers, model: str, error: PageinError | None = None, told: Lines = ()) -> None:
    for future in table.pop(model, []):
        _resolve(future, error, told)
