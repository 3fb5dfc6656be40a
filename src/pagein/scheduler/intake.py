"""Events into state: what each fact or wish changes, before anything is decided."""

from __future__ import annotations

from pagein.errors import ModelNotFound, Outgrown
from pagein.residency.ledger import Holding, Ledger
from pagein.residency.lifecycle import State
from pagein.residency.policy import cool
from pagein.scheduler import events as ev
from pagein.scheduler import resize
from pagein.scheduler.actions import Action, Note, Refuse, Renewed, Stop
from pagein.scheduler.acts import Acts
from pagein.scheduler.state import DAEMON, PRESENT, ModelState, SchedulerState, Waiter, left_of
from pagein.scheduler.trouble import outgrew
from pagein.scheduler.turns import note_arrival
from pagein.scheduler.words import note_reason, refusal, refuse, say
from pagein.units import format_bytes, format_duration

MOST_KEPT = 0.8
"""Share of its bytes that a model may keep asleep; one that keeps more did not sleep. Of a small model the interpreter
and its libraries are most: Whisper tiny keeps 70 %."""
TOLD_STEP = 0.1
"""Share of the budget by which what other programs leave of it must change before people are told again."""


def take_in(acts: Acts, event: ev.Event, now: float) -> None:
    """Update the state with one event; what follows from it at once (refusals, notes) is left in ``acts``."""
    state, out = acts.state, acts.out
    match event:
        case ev.Requested():
            _on_requested(state, out, event, now)
        case ev.Finished():
            _on_finished(state, out, event, now)
        case ev.LoadWanted():
            if (model := state.models.get(event.model)) is not None and not model.removed:
                _on_load_wanted(out, model, event.speculative, now)
        case ev.LoadUnwanted():
            if (model := state.models.get(event.model)) is not None:
                _on_load_unwanted(model)
        case ev.UnloadWanted():
            if (model := state.models.get(event.model)) is not None:
                model.wanted_since = None
                model.unload_wanted = model.state in PRESENT
        case ev.PinChanged():
            _on_pin_changed(state, out, event, now)
        case ev.BecameReady():
            _on_ready(state, out, event, now)
        case ev.Adopted():
            _on_adopted(state, out, event, now)
        case ev.LoadBroke() | ev.WorkerExited():
            _on_gone(acts, event, now)
        case ev.Stopped():
            _on_stopped(state, state.models[event.model], now)
        case ev.Freed():
            _on_freed(acts, event, now)
        case ev.LeftChanged():
            _charge_left(state, event.model, event.left)
        case ev.Slept():
            _on_slept(acts, event, now)
        case ev.SleepBroke():
            _on_sleep_broke(acts, state.models[event.model], event.reason)
        case ev.ResizeWanted():
            resize.want(acts, event)
        case ev.Resized():
            resize.settle(acts, event, now)
        case ev.RoomWanted():
            _on_room_wanted(acts, event, now)
        case ev.RoomEnded():
            _on_room_ended(state, event.room)
        case ev.Reconfigured():
            _on_reconfigured(acts, event, now)
        case ev.Measured():
            _on_measured(state, out, event)
        case ev.NeedLearned():
            _on_need_learned(state, out, event)
        case ev.ShutdownWanted():
            state.stopping = True
        case ev.Ticked():
            pass


def _on_requested(state: SchedulerState, out: list[Action], event: ev.Requested, now: float) -> None:
    model = state.models.get(event.model)
    if model is None:  # it went from the configuration in this moment
        out.append(Refuse(event.request_id, event.model, ModelNotFound(event.model, list(state.models))))
        return
    assert event.request_id not in state.model_of, f"request {event.request_id} came twice"
    state.model_of[event.request_id] = model.name
    waiter = Waiter(event.request_id, now, keep_alive=event.keep_alive)
    note_arrival(state, model, now)
    error = refusal(state, model, now)
    if error is not None:
        refuse(state, out, model, waiter, error)
    else:
        model.waiting.append(waiter)


def _on_finished(state: SchedulerState, out: list[Action], event: ev.Finished, now: float) -> None:
    name = state.model_of.pop(event.request_id, None)
    if name is None:
        return
    model = state.models.get(name)
    granted_at = state.granted_at.pop(event.request_id, now)
    leased = state.leases.give_back(event.request_id) is not None
    if model is None:  # its worker ended under this request, and it went from the configuration
        return
    if leased:
        model.heat = cool(model.heat, now - model.last_used) + 1
        model.last_used = now
        model.uses += 1
        model.served = True
        if event.answered:
            model.answered, model.failures, model.last_answer = True, 0, now
        if event.silent and model.last_answer < granted_at and model.state in (State.RESIDENT, State.DRAINING):
            model.hung = f"{model.name} hangs: it sent nothing for its time-out, and answered nothing else meanwhile"
    else:
        kept = [w for w in model.waiting if w.request_id != event.request_id]
        model.waiting.clear()
        model.waiting.extend(kept)


def _on_load_wanted(out: list[Action], model: ModelState, speculative: bool, now: float) -> None:
    model.speculative = speculative and (model.speculative or model.wanted_since is None)
    model.retry_at = None  # a manual retry does not wait for the back-off
    _call_off_unload(out, model, now)
    if (model.state is not State.RESIDENT or model.unload_wanted) and model.wanted_since is None:
        model.wanted_since = now  # one that leaves for its new settings returns


def _on_load_unwanted(model: ModelState) -> None:
    if model.priority != "high":  # that is wanted whoever asks
        model.wanted_since = None


def _on_pin_changed(state: SchedulerState, out: list[Action], event: ev.PinChanged, now: float) -> None:
    model = state.models.get(event.model)
    if model is None:
        return
    model.pinned = model.pin_wished = event.pinned
    say(out, model, f"{'pinned' if event.pinned else 'unpinned'} by the operator")
    if model.pinned:
        _call_off_unload(out, model, now)


def _call_off_unload(out: list[Action], model: ModelState, now: float) -> None:
    """The later wish wins while the worker was not told to leave: it serves on."""
    if not model.unload_wanted or model.stopping or model.successor is not None or model.removed:
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
    model.stayed_well, model.wished_keep, model.evicted_for, model.hung = False, None, None, None
    model.sleeps, model.speculative = event.sleeps, False
    _on_measured(state, out, ev.Measured({model.name: event.used}))
    used = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in event.used.items())
    say(out, model, f"ready after {format_duration(event.load_seconds)}, took {used or 'an unknown amount'}")


def _on_adopted(state: SchedulerState, out: list[Action], event: ev.Adopted, now: float) -> None:
    """It is there already, so it is charged whether it fits or not; what does not is an overdraft, acted on at once."""
    model = state.models[event.model]
    if model.state is not State.ABSENT:
        return
    model.life.move(State.LOADING, now)
    model.life.move(State.RESIDENT, now)
    model.allowance, model.used, model.sleeps = dict(event.allowance), dict(event.used), event.sleeps
    for pool in event.allowance | event.used:
        if (ledger := state.ledgers.get(pool)) is not None:
            ledger.charge(model.name, max(event.allowance.get(pool, 0), event.used.get(pool, 0)))
    if model.adjusts:
        resize.hold(model, event.allowance.get(model.pool))
    model.wanted_since, model.last_used = None, now
    say(out, model, "taken over from an earlier daemon, which had been killed")


def _on_gone(acts: Acts, event: ev.LoadBroke | ev.WorkerExited, now: float) -> None:
    state, model = acts.state, acts.state.models[event.model]
    if model.state in (State.ABSENT, State.RELEASING, State.FAILED):
        return
    asked_to_leave, unload_wanted, lived = model.stopping, model.unload_wanted, now - model.life.since
    was_usable = model.state is not State.LOADING
    _on_stopped(state, model, now)
    if asked_to_leave:
        return
    broke = isinstance(event, ev.LoadBroke)
    if isinstance(event.error, Outgrown) and outgrew(acts, model, event.error) and broke:
        return  # those who wait go on waiting: the next load reserves more
    if was_usable and lived >= state.limits.backoff_max:
        model.failures = 0
    acts.fail(model, event.error, now, refuse_waiting=broke)
    if not broke and model.priority == "high" and not unload_wanted:
        model.wanted_since, model.speculative = now, True


def _on_stopped(state: SchedulerState, model: ModelState, now: float) -> None:
    if not model.life.can_move(State.RELEASING):
        return
    model.life.move(State.RELEASING, now)
    state.begin_release(model.name)
    model.stopping = model.unload_wanted = model.sleeps = False
    model.hung = None
    model.used = {}
    resize.forget(model)


def _on_freed(acts: Acts, event: ev.Freed, now: float) -> None:
    state, model = acts.state, acts.state.models[event.model]
    if model.state is not State.RELEASING:
        return
    state.finish_release(model.name)
    _charge_left(state, model.name, event.left)
    if event.left:
        left = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in event.left.items())
        say(acts.out, model, f"it left {left} behind, which stay charged until they are measured to be free")
    model.life.move(State.ABSENT if model.error is None else State.FAILED, now)
    if model.successor is not None or model.removed:
        acts.renew(model)


def _charge_left(state: SchedulerState, name: str, left: dict[str, int]) -> None:
    holder = left_of(name)
    for pool, ledger in state.ledgers.items():
        if count := left.get(pool, 0):
            ledger.charge(holder, count)
        elif ledger.column_of(holder) is not None:
            ledger.begin_release(holder)
            ledger.finish_release(holder)


def _on_slept(acts: Acts, event: ev.Slept, now: float) -> None:
    """What it keeps is charged; a sleep that frees next to nothing is none, and the model leaves."""
    state, model = acts.state, acts.state.models[event.model]
    if model.state is not State.DRAINING or not model.stopping:
        return
    for pool, held in state.held(model.name).items():
        kept, before = event.used.get(pool, 0), event.before.get(pool, held)
        if kept > before * MOST_KEPT:
            told = f"its sleep kept {format_bytes(kept)} of {format_bytes(before)} of {pool}"
            _on_sleep_broke(acts, model, told)
            return
    state.finish_release(model.name)
    for pool, kept in event.used.items():
        if kept and pool in state.ledgers:
            state.ledgers[pool].charge(model.name, kept)
    model.used, model.stopping = dict(event.used), False
    model.allowance = {pool: max(count, model.allowance.get(pool, 0)) for pool, count in event.used.items()}
    model.life.move(State.ASLEEP, now)
    kept_now = ", ".join(f"{format_bytes(count)} of {pool}" for pool, count in event.used.items())
    say(acts.out, model, f"sleeps, and keeps {kept_now or 'nothing'}")


def _on_sleep_broke(acts: Acts, model: ModelState, reason: str) -> None:
    """It is on its way out already; now it must really leave."""
    if model.state is State.DRAINING and model.stopping:
        model.sleeps = False
        acts.out.append(Stop(model.name, note_reason(model, f"it did not sleep: {reason}"), None))


def _on_room_wanted(acts: Acts, event: ev.RoomWanted, now: float) -> None:
    state = acts.state
    room = ModelState(event.room, "medium", {event.pool: event.bytes}, "asked for", outsider=True, wanted_since=now)
    room.used = {} if event.measured else {event.pool: event.bytes}
    state.rooms[event.room] = room
    if state.stopping:
        acts.deny(room, "the daemon is stopping")


def _on_room_ended(state: SchedulerState, name: str) -> None:
    room = state.rooms.pop(name, None)
    if room is not None and room.state is State.RESIDENT:
        state.begin_release(name)
        state.finish_release(name)


def _on_reconfigured(acts: Acts, event: ev.Reconfigured, now: float) -> None:
    state = acts.state
    state.limits = event.limits or state.limits
    for pool, budget in event.budgets.items():
        state.ledgers.setdefault(pool, Ledger(pool, budget)).budget = budget
    for name in event.removed:
        if (model := state.models.get(name)) is not None:
            model.removed, model.successor, model.edit, model.wanted_since = True, None, None, None
            acts.refuse_all(model, ModelNotFound(name, [m for m in state.models if m not in event.removed]))
            acts.give_way(model)
    for name, fresh in event.changed.items():
        model = state.models.get(name)
        if model is None:
            state.models[name] = fresh
            acts.out.append(Renewed(name, False, note_reason(fresh, "new in the configuration")))
        elif not _lives_on(acts, event, model, fresh):
            model.successor, model.removed, model.edit = fresh, False, None
            acts.give_way(model)


def _lives_on(acts: Acts, event: ev.Reconfigured, model: ModelState, fresh: ModelState) -> bool:
    """Whether nothing but bytes changed, and it can take those while it lives."""
    if model.name in event.allotted and resize.stands(acts, model, fresh):
        return True
    return model.name in event.resized | event.allotted and resize.edit(acts, model, fresh)


def _on_measured(state: SchedulerState, out: list[Action], event: ev.Measured) -> None:
    state.available.update(event.available)
    if event.pressure is not None:
        state.pressure = event.pressure
    for name, used in event.used.items():
        model = state.holder(name)
        if model is None or model.state not in PRESENT:
            continue
        model.used = dict(used)
        if model.outsider:  # what it takes beyond its lease shows in what the machine has available
            continue
        for pool, count in used.items():
            _charge(state, model, pool, count)
    if event.daemon is not None and "ram" in state.ledgers:
        state.own_least = state.own_least or event.daemon
        state.ledgers["ram"].charge(DAEMON, max(event.daemon, state.own_least))
    if event.available and event.daemon is not None:  # a whole sample: what was read apart is not compared
        _on_machine(state, out, list(event.available))


def _on_machine(state: SchedulerState, out: list[Action], pools: list[str]) -> None:
    """Notice what other programs leave of the budget; what two samples in a row show short counts."""
    for pool in pools:
        ledger = state.ledgers.get(pool)
        if ledger is None or state.available.get(pool) is None:
            continue
        short = state.short(pool)
        state.short_lasting[pool] = min(short, state.short_last.get(pool, 0))
        state.short_last[pool] = short
        effective, told = state.effective(pool), state.told_effective.get(pool, ledger.budget)
        if abs(effective - told) >= ledger.budget * TOLD_STEP or (effective == ledger.budget) != (
            told == ledger.budget
        ):
            state.told_effective[pool] = effective
            rest = f"other programs leave {format_bytes(effective)} of the budget of {format_bytes(ledger.budget)}"
            free = f"the whole budget of {format_bytes(ledger.budget)} can be used again"
            out.append(Note(None, f"{pool}: {rest if effective < ledger.budget else free}"))


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
