"""What is done where memory runs out: liars, overdrawn pools, other programs, pressure (decision 1). Pure."""

from __future__ import annotations

from pagein.errors import Outgrown
from pagein.memory.pressure import PressureLevel
from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate, choose_victims
from pagein.scheduler.acts import Acts
from pagein.scheduler.outlook import kept_bytes
from pagein.scheduler.state import PRESENT, ModelState, SchedulerState
from pagein.scheduler.words import say
from pagein.units import format_bytes

GROWTH = 2
"""A model that outgrew its allowance reserves so many times as much next, since nobody knows how much it wanted."""
GUESSED = "outgrown"
"""The source of a need that is such a guess."""
HEADROOM = 1.2
"""The same over what it was measured to reach (G3 of the original systems: measurement plus 20 %)."""
RESIZE_PAUSE = 5.0
"""Seconds after a change of its allowance in which nobody is a liar: a sample that was begun before may come late."""
PRESSURE_PAUSE = 2.0
"""Seconds between two models that leave for critical pressure: the ten-second averages show an eviction late."""


def outgrew(acts: Acts, model: ModelState, error: Outgrown) -> bool:
    """Raise what the next load of a model reserves; False when it had all that the budget can ever give it."""
    pool = str(error.details["pool"])
    ledger = acts.state.ledgers.get(pool)
    if ledger is None:
        return False
    had, peak = model.allowance.get(pool, 0), error.details.get("peak_bytes")
    most = ledger.budget - kept_bytes(acts.state, pool, model.name)[0]
    reached = int(peak * HEADROOM) if isinstance(peak, int) else 0
    wanted = min(most, max(had * GROWTH, reached, model.need.get(pool, 0)))
    model.outgrew[pool] = max(had, model.outgrew.get(pool, 0))
    if wanted <= had:
        return False
    if wanted > model.need.get(pool, 0):
        model.need = {**model.need, pool: wanted}
        model.need_source = GUESSED
        say(acts.out, model, f"{error.message}; its next load reserves {format_bytes(wanted)}")
    return True


def settle_for_less(state: SchedulerState) -> None:
    """A guess that the budget cannot give (any more) is cut to what it can, while that is more than was outgrown."""
    for model in state.models.values():
        if model.need_source != GUESSED:
            continue
        for pool, need in model.need.items():
            if (ledger := state.ledgers.get(pool)) is not None:
                most = ledger.budget - kept_bytes(state, pool, model.name)[0]
                if model.outgrew.get(pool, 0) < most < need:
                    model.need = {**model.need, pool: most}


def end_liars(acts: Acts, now: float) -> None:
    """End who was measured beyond its allowance and the margin, where no cgroup does it."""
    limits = acts.state.limits
    for model in acts.state.models.values():
        if model.state not in PRESENT or model.stopping or now - model.resized_at < RESIZE_PAUSE:
            continue
        for pool in limits.watched:
            allowance, used = model.allowance.get(pool, 0), model.used.get(pool, 0)
            if used > limits.end_at(allowance):
                _end_liar(
                    acts, model, Outgrown(model.name, pool, allowance, limits.end_at(allowance), used, _WATCH), now
                )
                break


_WATCH = "the watchdog, which measured it"


def _end_liar(acts: Acts, model: ModelState, error: Outgrown, now: float) -> None:
    unused = model.state is State.LOADING or not (model.served or acts.state.busy(model.name))
    can_grow = outgrew(acts, model, error)
    acts.kill(model, error, now)
    if not (unused and can_grow):  # a load that can be given more goes on with that, and nobody sees a failure
        acts.fail(model, error, now, refuse_waiting=unused)


def relieve_overdraft(acts: Acts, now: float) -> None:
    """Where more is held than the budget, or promised than the machine has, idle models leave.

    Where they are not enough for an overdraft, the one furthest over its allowance is ended, and only that one. Nobody
    is ended for what other programs took.
    """
    state = acts.state
    for pool, ledger in state.ledgers.items():
        coming = state.coming(pool) + state.giving_back(pool)
        lasting = min(state.short_lasting.get(pool, 0), state.short(pool))  # what came back since is not short
        over, short = ledger.overdraft - coming, lasting - coming
        if over > 0:
            why = f"{pool} was measured {format_bytes(ledger.overdraft)} over its budget"
            idle = list(state.idle(now))
            victims = choose_victims(idle, {pool: over})
            liar = max(_over_allowance(state, pool), key=lambda m: _excess(state, m, pool), default=None)
            if victims is None and liar is not None:  # others would leave in vain
                allowance, used = liar.allowance.get(pool, 0), ledger.bytes_of(liar.name)
                by = f"Pagein: {why}, and too little is idle"
                error = Outgrown(liar.name, pool, allowance, allowance, used, by)
                _end_liar(acts, liar, error, now)
            elif victims or (victims := [c for c in idle if c.bytes.get(pool)]):
                acts.evict(victims, None, f"because {why}", now)
        elif short > 0:
            victims = choose_victims(state.idle(now), {pool: short}) or _with_bytes(state, pool, now)
            if victims:
                acts.evict(victims, None, f"because other programs took {format_bytes(short)} of {pool}", now)


def relieve_pressure(acts: Acts, now: float) -> None:
    """Tight: idle models of low priority leave. Critical: idle ones leave one by one, while the signs are fresh."""
    state, pressure = acts.state, acts.state.pressure
    if pressure.level is PressureLevel.CALM or not pressure.signs:
        return
    critical = pressure.level is PressureLevel.CRITICAL
    if state.pressed_at is not None and now - state.pressed_at < PRESSURE_PAUSE:
        return
    candidates = [c for c in _with_bytes(state, "ram", now) if critical or state.models[c.name].priority == "low"]
    if candidates and state.unload_running({"ram": 1}) is None:
        state.pressed_at = now
        acts.evict(candidates, None, f"because memory is {pressure.level}: {'; '.join(pressure.signs)}", now)


def _with_bytes(state: SchedulerState, pool: str, now: float) -> list[Candidate]:
    """Idle models that hold bytes of a pool, the first to leave first."""
    idle = [c for c in state.idle(now) if c.bytes.get(pool)]
    return sorted(idle, key=lambda c: (c.rank, c.cost_per_byte((pool,)), c.name))


def _over_allowance(state: SchedulerState, pool: str) -> list[ModelState]:
    return [m for m in state.models.values() if m.state in PRESENT and not m.stopping and _excess(state, m, pool) > 0]


def _excess(state: SchedulerState, model: ModelState, pool: str) -> int:
    return state.ledgers[pool].bytes_of(model.name) - model.allowance.get(pool, 0)
