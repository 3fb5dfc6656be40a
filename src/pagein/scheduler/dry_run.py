"""What would become of a request that came now: the scheduler's own questions, in its order; changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate
from pagein.scheduler.outlook import Outcome, held_up_by, outlook
from pagein.scheduler.state import ModelState, SchedulerState, open_slots
from pagein.scheduler.words import refusal, why_wait

_WORDS = {
    Outcome.NEVER: "refuse",
    Outcome.FITS: "load",
    Outcome.COMING: "wait",
    Outcome.EVICT: "evict",
    Outcome.BUSY: "wait",
    Outcome.FOREIGN: "wait",
}


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The answer for one model."""

    outcome: str
    """resident, loading, load (fits), evict (fits after evictions), wait or refuse."""
    reason: str
    victims: list[Candidate] = field(default_factory=list)
    """Who would leave, first one first."""


def foresee(state: SchedulerState, model: ModelState, now: float) -> Foreseen:
    """Tell what a request for a model would meet. The scheduler has settled: whoever waits for room still has none."""
    error = refusal(state, model, now)
    if error is not None:
        return Foreseen("refuse", error.message)
    if model.state is State.LOADING and not model.unload_wanted:
        return Foreseen("loading", model.last_reason)
    if model.state is State.RESIDENT and not model.unload_wanted and model.hung is None:
        free = open_slots(state, model) > 0 and model.name not in state.yielding
        return Foreseen("resident", model.last_reason if free else why_wait(state, model))
    if model.state not in (State.ABSENT, State.FAILED, State.ASLEEP) or model.stopping:
        return Foreseen("wait", why_wait(state, model))
    view = outlook(state, model, now)
    first = held_up_by(state, model, _waits_before(state, model, now))
    if first is not None and view.outcome is not Outcome.NEVER:
        return Foreseen("wait", f"{view.reason}; {first.name} was asked for before")
    return Foreseen(_WORDS[view.outcome], view.reason, view.victims if view.outcome is Outcome.EVICT else [])


def _waits_before(state: SchedulerState, model: ModelState, now: float) -> list[ModelState]:
    """Models that wait for room and were asked for before this one."""
    since = model.oldest_wish()
    mine = (now if since is None else since, model.name)
    return [
        other
        for other in state.wishes()
        if (other.oldest_wish() or 0.0, other.name) < mine
        and not other.backs_off(now)
        and outlook(state, other, now).outcome not in (Outcome.NEVER, Outcome.FOREIGN)
    ]
