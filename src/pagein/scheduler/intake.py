"""Events into state: what each fact or wish changes, before anything is decided."""

from __future__ import annotations

from pagein.errors import LoadFailed, QueueFull, ShuttingDown
from pagein.residency.lifecycle import State
from pagein.residency.policy import cool
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action
from pagein.scheduler.state import DAEMON, ModelState, SchedulerState, Waiter, open_slots
from pagein.scheduler.words import backing_off, refuse, say
from pagein.units import format_bytes, format_duration


def take_in(state: SchedulerState, out: list[Action], event: ev.Event, now: float) -> None:
    """Update the state with one event; what follows from it at once (refusals, notes) is appended to ``out``."""
    match event:
        case ev.Requested():
            _on_requested(state, out, event, now)
        case ev.Finished():
            _on_finished(state, out, event, now)
        case ev.LoadWanted():
            _on_load_wanted(state, out, state.models[event.model], now)
        case ev.UnloadWanted():
            model = state.models[event.model]
            model.wanted_since = None
            model.unload_wanted = model.state in (State.LOADING, State.RESIDENT, State.DRAINING)
        case ev.PinChanged():
            model = state.models[event.model]
            model.pinned = event.pinned
            say(out, model, f"{'pinned' if event.pinned else 'unpinned'} by the operator")
        case ev.BecameReady():
            _on_ready(state, out, event, now)
        case ev.LoadBroke() | ev.WorkerExited():
            _on_gone(state, out, event, now)
        case ev.Stopped():
            _on_stopped(state, out, state.models[event.model], now)
        case ev.Freed():
            _on_freed(state, out, state.models[event.model], now)
        case ev.Measured():
            _on_measured(state, out, event)
        case ev.NeedLearned():
            _on_need_learned(state, out, event)
        case ev.ShutdownWanted():
            state.stopping = True
        case ev.Ticked():
            pass


def _on_requested(state: SchedulerState, out: list[Action], event: ev.Requested, now: float) -> None:
    model = state.models[event.model]
    assert event.request_id not in state.model_of, f"request {event.request_id} came twice"
    state.model_of[event.request_id] = model.name
    waiter = Waiter(event.request_id, now)
    if state.stopping:
        refuse(state, out, model, waiter, ShuttingDown("the daemon is stopping"))
    elif model.problem is not None:
        refuse(state, out, model, waiter, LoadFailed(f"model {model.name!r} cannot be served: {model.problem}"))
    elif model.state in (State.RELEASING, State.FAILED) and model.retry_at is not None and now < model.retry_at:
        refuse(state, out, model, waiter, backing_off(model, now))
    elif len(model.waiting) >= model.queue_limit + open_slots(state, model):
        refuse(state, out, model, waiter, QueueFull(model.name, len(model.waiting), model.queue_limit))
    else:
        model.waiting.append(waiter)


def _on_finished(state: SchedulerState, out: list[Action], event: ev.Finished, now: float) -> None:
    name = state.model_of.pop(event.request_id, None)
    if name is None:
        return
    model = state.models[name]
    if state.leases.give_back(event.request_id) is not None:
        model.heat = cool(model.heat, now - model.last_used) + 1
        model.last_used = now
        model.uses += 1
        model.served = True
    else:
        kept = [w for w in model.waiting if w.request_id != event.request_id]
        model.waiting.clear()
        model.waiting.extend(kept)


def _on_load_wanted(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    if model.state is State.FAILED:
        model.retry_at = None  # a manual retry does not wait for the back-off
    model.unload_wanted = False
    if model.state is not State.RESIDENT and model.wanted_since is None:
        model.wanted_since = now


def _on_ready(state: SchedulerState, out: list[Action], event: ev.BecameReady, now: float) -> None:
    model = state.models[event.model]
    if model.state is not State.LOADING:
        return  # it was told to leave meanwhile; its end is on the way
    model.life.move(State.RESIDENT, now)
    for ledger in state.ledgers.values():
        if ledger.bytes_of(model.name):
            ledger.confirm(model.name)
    model.loads += 1
    model.load_seconds = event.load_seconds
    model.failures, model.retry_at, model.error = 0, None, None
    model.wanted_since, model.served, model.last_used = None, False, now
    _on_measured(state, out, ev.Measured({model.name: event.used}))
    used = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in event.used.items())
    say(out, model, f"ready after {format_duration(event.load_seconds)}, took {used or 'an unknown amount'}")


def _on_gone(state: SchedulerState, out: list[Action], event: ev.LoadBroke | ev.WorkerExited, now: float) -> None:
    model = state.models[event.model]
    if model.state in (State.ABSENT, State.RELEASING, State.FAILED):
        return
    asked_to_leave = model.stopping
    _on_stopped(state, out, model, now)
    if asked_to_leave:
        return
    model.failures += 1
    model.error = event.error
    pause = min(
        state.limits.backoff_max,
        state.limits.backoff_first * 2.0 ** min(model.failures - 1, 30),
    )
    model.retry_at = now + pause
    say(out, model, f"{event.error.message}; next try in {format_duration(pause)} at the earliest")
    if isinstance(event, ev.LoadBroke):
        if model.priority != "high":
            model.wanted_since = None
        while model.waiting:
            refuse(state, out, model, model.waiting.popleft(), event.error)
    elif model.priority == "high":
        model.wanted_since = now


def _on_stopped(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    if not model.life.can_move(State.RELEASING):
        return
    model.life.move(State.RELEASING, now)
    for ledger in state.ledgers.values():
        if ledger.bytes_of(model.name) and not model.stopping:
            ledger.begin_release(model.name)
    model.stopping = False
    model.unload_wanted = False
    model.used = {}


def _on_freed(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    if model.state is not State.RELEASING:
        return
    for ledger in state.ledgers.values():
        if ledger.bytes_of(model.name):
            ledger.finish_release(model.name)
    model.life.move(State.ABSENT if model.error is None else State.FAILED, now)


def _on_measured(state: SchedulerState, out: list[Action], event: ev.Measured) -> None:
    state.available.update(event.available)
    for name, used in event.used.items():
        model = state.models.get(name)
        if model is None or model.state not in (State.LOADING, State.RESIDENT, State.DRAINING):
            continue
        model.used = dict(used)
        for pool, count in used.items():
            ledger = state.ledgers.get(pool)
            if ledger is not None and 0 < ledger.bytes_of(name) < count:
                ledger.resize(name, count)
    if event.daemon is not None and "ram" in state.ledgers:
        ledger = state.ledgers["ram"]
        ledger.charge(DAEMON, max(event.daemon, ledger.bytes_of(DAEMON)))


def _on_need_learned(state: SchedulerState, out: list[Action], event: ev.NeedLearned) -> None:
    model = state.models[event.model]
    if event.need != model.need:
        was = ", ".join(f"{format_bytes(c)} of {p}" for p, c in model.need.items())
        becomes = ", ".join(f"{format_bytes(c)} of {p}" for p, c in event.need.items())
        say(out, model, f"next load reserves {becomes} ({event.source}) instead of {was} ({model.need_source})")
    model.need, model.need_source = dict(event.need), event.source
