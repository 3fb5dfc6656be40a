"""Events into state: what each fact or wish changes, before anything is decided."""

from __future__ import annotations

from pagein.residency.ledger import Holding
from pagein.residency.lifecycle import State
from pagein.residency.policy import cool
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action
from pagein.scheduler.state import DAEMON, ModelState, SchedulerState, Waiter
from pagein.scheduler.words import refusal, refuse, say
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
        case ev.LoadUnwanted():
            _on_load_unwanted(state.models[event.model])
        case ev.UnloadWanted():
            model = state.models[event.model]
            model.wanted_since = None
            model.unload_wanted = model.state in (State.LOADING, State.RESIDENT, State.DRAINING)
        case ev.PinChanged():
            _on_pin_changed(state, out, event, now)
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
    error = refusal(state, model, now)
    if error is not None:
        refuse(state, out, model, waiter, error)
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
        if event.answered:
            model.answered, model.failures = True, 0
    else:
        kept = [w for w in model.waiting if w.request_id != event.request_id]
        model.waiting.clear()
        model.waiting.extend(kept)


def _on_load_wanted(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    model.retry_at = None  # a manual retry does not wait for the back-off
    _call_off_unload(out, model, now)
    if model.state is not State.RESIDENT and model.wanted_since is None:
        model.wanted_since = now


def _on_load_unwanted(model: ModelState) -> None:
    if model.priority != "high":  # that is wanted whoever asks
        model.wanted_since = None


def _on_pin_changed(state: SchedulerState, out: list[Action], event: ev.PinChanged, now: float) -> None:
    model = state.models[event.model]
    model.pinned = event.pinned
    say(out, model, f"{'pinned' if event.pinned else 'unpinned'} by the operator")
    if model.pinned:
        _call_off_unload(out, model, now)


def _call_off_unload(out: list[Action], model: ModelState, now: float) -> None:
    """The later wish wins while the worker was not told to leave: it serves on."""
    if not model.unload_wanted or model.stopping:
        return
    model.unload_wanted = False
    if model.state is State.DRAINING:
        model.life.move(State.RESIDENT, now)
    say(out, model, "its unload was called off by the operator")


def _on_ready(state: SchedulerState, out: list[Action], event: ev.BecameReady, now: float) -> None:
    model = state.models[event.model]
    if model.state is not State.LOADING:
        return  # it was told to leave meanwhile; its end is on the way
    model.life.move(State.RESIDENT, now)
    state.yielding.pop(model.name, None)  # its own turn begins: who loaded it is served first
    for ledger in state.ledgers.values():
        if ledger.column_of(model.name) is Holding.RESERVED:
            ledger.confirm(model.name)
    model.loads += 1
    model.load_seconds = event.load_seconds
    model.retry_at, model.error, model.wanted_since = None, None, None
    model.served, model.answered, model.last_used = False, False, now
    _on_measured(state, out, ev.Measured({model.name: event.used}))
    used = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in event.used.items())
    say(out, model, f"ready after {format_duration(event.load_seconds)}, took {used or 'an unknown amount'}")


def _on_gone(state: SchedulerState, out: list[Action], event: ev.LoadBroke | ev.WorkerExited, now: float) -> None:
    model = state.models[event.model]
    if model.state in (State.ABSENT, State.RELEASING, State.FAILED):
        return
    asked_to_leave, unload_wanted, lived = model.stopping, model.unload_wanted, now - model.life.since
    was_usable = model.state is not State.LOADING
    _on_stopped(state, out, model, now)
    if asked_to_leave:
        return
    if was_usable and lived >= state.limits.backoff_max:
        model.failures = 0
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
    elif model.priority == "high" and not unload_wanted:
        model.wanted_since = now


def _on_stopped(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    if not model.life.can_move(State.RELEASING):
        return
    model.life.move(State.RELEASING, now)
    state.begin_release(model.name)
    model.stopping = False
    model.unload_wanted = False
    model.used = {}


def _on_freed(state: SchedulerState, out: list[Action], model: ModelState, now: float) -> None:
    if model.state is not State.RELEASING:
        return
    state.finish_release(model.name)
    model.life.move(State.ABSENT if model.error is None else State.FAILED, now)


def _on_measured(state: SchedulerState, out: list[Action], event: ev.Measured) -> None:
    state.available.update(event.available)
    for name, used in event.used.items():
        model = state.models.get(name)
        if model is None or model.state not in (State.LOADING, State.RESIDENT, State.DRAINING):
            continue
        model.used = dict(used)
        for pool, count in used.items():
            _charge(state, model, pool, count)
    if event.daemon is not None and "ram" in state.ledgers:
        state.own_least = state.own_least or event.daemon
        state.ledgers["ram"].charge(DAEMON, max(event.daemon, state.own_least))


def _charge(state: SchedulerState, model: ModelState, pool: str, count: int) -> None:
    """Record what was measured above what is held; also in a pool that the model was not expected to use."""
    ledger = state.ledgers.get(pool)
    if ledger is None or count <= ledger.bytes_of(model.name):
        return
    if ledger.column_of(model.name) is not None:
        ledger.resize(model.name, count)
        return
    ledger.charge(model.name, count)
    if model.stopping:
        ledger.begin_release(model.name)


def _on_need_learned(state: SchedulerState, out: list[Action], event: ev.NeedLearned) -> None:
    model = state.models[event.model]
    if event.need != model.need:
        was = ", ".join(f"{format_bytes(c)} of {p}" for p, c in model.need.items())
        becomes = ", ".join(f"{format_bytes(c)} of {p}" for p, c in event.need.items())
        say(out, model, f"next load reserves {becomes} ({event.source}) instead of {was} ({model.need_source})")
    model.need, model.need_source = dict(event.need), event.source
