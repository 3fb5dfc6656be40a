"""How the scheduler says what it decides: refusals, notes, and why a request waits."""

from __future__ import annotations

from pagein.errors import LoadFailed, ModelNotFound, PageinError, QueueFull, ShuttingDown
from pagein.residency.lifecycle import State
from pagein.scheduler.actions import Action, Note, Refuse, Wait
from pagein.scheduler.state import ModelState, SchedulerState, Waiter, open_slots
from pagein.scheduler.turns import computes_before
from pagein.units import format_duration


def backing_off(model: ModelState, now: float) -> LoadFailed:
    """The refusal of a request that comes during the back-off after failed loads."""
    assert model.retry_at is not None
    last = model.error.message if model.error is not None else "unknown"
    times = f"{model.failures} time" + ("s" if model.failures != 1 else "")
    return LoadFailed(
        f"model {model.name!r} failed {times}; next try in {format_duration(model.retry_at - now)}: {last}",
        hint=f"see its log; `pagein load {model.name}` tries at once",
        model=model.name,
        failures=model.failures,
        retry_after=max(1, round(model.retry_at - now)),
    )


def refusal(state: SchedulerState, model: ModelState, now: float) -> PageinError | None:
    """The error with which a request that comes now ends at once, or None; what never fits is told by `outlook`."""
    if state.stopping:
        return ShuttingDown("the daemon is stopping")
    if model.removed:
        return ModelNotFound(model.name, [m.name for m in state.models.values() if not m.removed])
    if model.problem is not None:
        return LoadFailed(f"model {model.name!r} cannot be served: {model.problem}")
    if model.state in (State.RELEASING, State.FAILED) and model.backs_off(now):
        return backing_off(model, now)
    if len(model.waiting) >= model.queue_limit + open_slots(state, model):
        return QueueFull(model.name, len(model.waiting), model.queue_limit)
    return None


def refuse(state: SchedulerState, out: list[Action], model: ModelState, waiter: Waiter, error: PageinError) -> None:
    """End a waiting request with an error."""
    state.model_of.pop(waiter.request_id, None)
    out.append(Refuse(waiter.request_id, model.name, error))


def note_reason(model: ModelState, reason: str) -> str:
    """Remember why the model stands as it does, and return it."""
    model.last_reason = reason
    return reason


def say(out: list[Action], model: ModelState, reason: str) -> None:
    """Tell people about something that needs no act."""
    out.append(Note(model.name, note_reason(model, reason)))


def tell_waiters(state: SchedulerState, out: list[Action], everyone: bool) -> None:
    """Say to new waiters, and on a tick to all, why they wait and in which place."""
    for model in state.models.values():
        if not model.waiting or (not everyone and model.waiting[-1].told is not None):
            continue
        reason = why_wait(state, model)
        for place, waiter in enumerate(model.waiting, start=1):
            if waiter.told != (reason, place) and (everyone or waiter.told is None):
                waiter.told = (reason, place)
                out.append(Wait(waiter.request_id, model.name, reason, place))


def why_wait(state: SchedulerState, model: ModelState) -> str:
    """Say what the requests of a model wait for now."""
    if model.state is State.RESIDENT and not model.unload_wanted:
        turn = state.yielding.get(model.name)
        if turn is not None:
            return f"{model.name} yields its turn to {turn}"
        if model.hung is not None:
            return model.hung
        first = computes_before(state, model)
        if first is not None:
            return f"{first.name} computes first: heavy models of {model.device} take turns"
        count = state.leases.count(model.name)
        return f"{model.name} is serving {count} request{'s' if count != 1 else ''}, {model.parallel} at a time"
    if model.unload_wanted or model.state is State.DRAINING or model.state is State.RELEASING:
        return f"{model.name} is leaving and will be loaded again"
    return model.last_reason
