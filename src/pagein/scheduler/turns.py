"""Who has its turn: how long an idle model is kept for its clients, and which heavy model computes. Pure questions."""

from __future__ import annotations

from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate
from pagein.scheduler.state import ModelState, SchedulerState, open_slots

LEAST_STAY = 0.02
"""Seconds below which a minimum residency that was halved in vain again and again counts as none."""
TURN = 1.0
"""Seconds in which a heavy model that computes takes further requests although another heavy one was asked before."""
HOLD_FACTOR = 2.0
"""An idle model is held for this many of the pauses that its clients make: they vary."""


def kept_until(state: SchedulerState, model: ModelState) -> float:
    """Until when an idle model stays although another wants its room.

    After a load it stays for its minimum residency, so that two clients do not throw each other's models out in turn;
    after a request for twice the pauses that its clients make (an agent that runs tools). Neither counts past the
    patience of those who wait, for a model that yields its turn, or for one that low priority sends away after use.
    """
    limits = state.limits
    if model.state is not State.RESIDENT or model.name in state.yielding:
        return 0.0
    until = model.life.since + min(limits.patience, stay_of(state, model))
    if model.pause is not None:
        until = max(until, model.last_used + min(limits.hold, limits.patience, HOLD_FACTOR * model.pause))
    return until


def stay_of(state: SchedulerState, model: ModelState) -> float:
    """The minimum residency of a model, as its clients made it worth."""
    return model.stay if model.stay is not None else state.limits.min_residency


def evictable(state: SchedulerState, now: float) -> list[Candidate]:
    """Idle models that are not kept for their clients."""
    return [c for c in state.idle(now) if kept_until(state, state.models[c.name]) <= now]


def note_arrival(state: SchedulerState, model: ModelState, now: float) -> None:
    """Learn from when a request comes: the pauses of its clients, and whether the model left too early."""
    if model.state is State.RESIDENT and model.served and not state.busy(model.name) and not model.waiting:
        model.stayed_well = True
        _note_pause(state, model, now)
    elif model.evicted_for is not None and (other := state.holder(model.evicted_for)) is not None:
        if not other.served or other.state is not State.RESIDENT:  # it is wanted before its room was of any use
            model.stay = None
            _note_pause(state, model, now)
        model.evicted_for = None


def _note_pause(state: SchedulerState, model: ModelState, now: float) -> None:
    """Longer ones count at once, shorter ones little by little; one beyond the hold is no pause of a loop."""
    pause = now - model.last_used
    model.pause = max(pause, (model.pause or 0.0) / 2) if pause <= state.limits.hold else None


def note_eviction(state: SchedulerState, model: ModelState, wanting: str) -> None:
    """Learn from an eviction: a stay that brought no request is half as long next time."""
    model.evicted_for = wanting
    if model.served and not model.stayed_well and model.state is State.RESIDENT:
        half = stay_of(state, model) / 2
        model.stay = half if half >= LEAST_STAY else 0.0
    elif model.stayed_well:
        model.stay = None


def computes_before(state: SchedulerState, model: ModelState) -> ModelState | None:
    """The heavy model of the same device that computes now or is to do so first, None when it is this one's turn."""
    if not model.heavy or not state.limits.locks(model.device):
        return None
    mine = (model.waiting[0].since, model.name) if model.waiting else None
    first: ModelState | None = None
    for other in state.models.values():
        if other is model or not other.heavy or other.device != model.device:
            continue
        if state.busy(other.name):
            return other
        if has_its_turn(state, model):
            continue
        if mine is not None and _could_compute(state, other) and (other.waiting[0].since, other.name) < mine:
            first = first or other
    return first


def has_its_turn(state: SchedulerState, model: ModelState) -> bool:
    """Whether it computes and its turn is young: then it may fill its slots, since a batch costs little more."""
    return state.busy(model.name) and state.now - model.turn_since < TURN


def _could_compute(state: SchedulerState, model: ModelState) -> bool:
    return (
        bool(model.waiting)
        and model.state is State.RESIDENT
        and not (model.unload_wanted or model.stopping or model.hung or model.name in state.yielding)
        and open_slots(state, model) > 0
    )
