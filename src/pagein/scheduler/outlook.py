"""What it would take to bring a model in now: one pure question, asked by the scheduler and by the dry run."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from pagein.errors import NeverFits
from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate, choose_victims
from pagein.scheduler.state import DAEMON, ModelState, SchedulerState, left_of
from pagein.scheduler.turns import evictable, kept_until
from pagein.units import format_bytes, format_duration


class Outcome(StrEnum):
    """The answer, in one word."""

    NEVER = "never"
    """The budget can never give it enough, whoever leaves."""
    FITS = "fits"
    """Enough is free."""
    COMING = "coming"
    """Enough is on its way back."""
    EVICT = "evict"
    """Enough is free once the victims are gone."""
    BUSY = "busy"
    """Enough would be free if models in use left."""
    FOREIGN = "foreign"
    """The ledger has room, the machine does not: other programs use it."""


@dataclass(frozen=True, slots=True)
class Outlook:
    """The answer with its numbers."""

    outcome: Outcome
    reason: str
    victims: list[Candidate] = field(default_factory=list)
    """Who must leave (EVICT), or who is in the way (BUSY)."""
    error: NeverFits | None = None


def kept_bytes(state: SchedulerState, pool: str, without: str) -> tuple[int, list[str]]:
    """Bytes of a pool that never become free for a model, and the names of the models that keep them."""
    ledger = state.ledgers[pool]
    total, names = min(state.own_least, ledger.bytes_of(DAEMON)), []
    for model in state.models.values():
        if model.name == without or not model.kept:
            continue
        count = ledger.bytes_of(model.name)
        if model.wanted_since is not None:
            count = max(count, model.need.get(pool, 0))
        if count:
            total += count
            names.append(model.name)
    return total, names


def never_fits(state: SchedulerState, model: ModelState) -> NeverFits | None:
    """Return the refusal when no eviction could ever make room (rule 4), else None."""
    for pool, need in model.need.items():
        ledger = state.ledgers.get(pool)
        if ledger is None:
            return NeverFits(model.name, pool, need, 0, 0, [])
        kept, names = kept_bytes(state, pool, model.name)
        available = max(0, ledger.budget - kept)
        if need > available:
            return NeverFits(model.name, pool, need, available, ledger.budget, names)
    return None


def held_up_by(state: SchedulerState, model: ModelState, blocked: list[ModelState]) -> ModelState | None:
    """The first of the models that wait for room whose room this one could take away, or None."""
    return next((first for first in blocked if not _leaves_room(state, first, model)), None)


def _leaves_room(state: SchedulerState, model: ModelState, newcomer: ModelState) -> bool:
    """Whether a model that waits could still be brought in if the newcomer stayed for ever."""
    for pool, need in model.need.items():
        kept, _ = kept_bytes(state, pool, model.name)
        if need > state.ledgers[pool].budget - kept - newcomer.need.get(pool, 0):
            return False
    return True


def outlook(state: SchedulerState, model: ModelState, now: float) -> Outlook:
    """Tell what it takes to bring a model in; changes nothing."""
    refusal = never_fits(state, model)
    if refusal is not None:
        return Outlook(Outcome.NEVER, refusal.message, error=refusal)
    need = state.wanted_bytes(model)
    needs = f"needs {_amounts(need)}, {_amounts({p: state.free(p) for p in need})} free"
    deficit = {pool: count - state.free(pool) for pool, count in need.items() if count > state.free(pool)}
    if not deficit:
        return Outlook(Outcome.FITS, needs)
    rest = {pool: count - state.coming(pool) for pool, count in deficit.items()}
    if all(count <= 0 for count in rest.values()):
        pools = [pool for pool in deficit if state.coming(pool)]
        leaving = [m.name for m in state.models.values() if m.leaving and any(p in state.held(m.name) for p in pools)]
        return Outlook(Outcome.COMING, f"{needs}; waiting for the memory of {', '.join(leaving)}")
    victims = choose_victims((c for c in evictable(state, now) if c.name != model.name), rest)
    if victims is not None:
        return Outlook(Outcome.EVICT, f"{needs}; {', '.join(v.name for v in victims)} can leave", victims)
    others = [c for c in (*state.idle(now), *state.in_use(now)) if c.name != model.name]
    blockers = choose_victims(others, rest)
    if blockers is not None:
        return Outlook(Outcome.BUSY, f"{needs}; {_in_the_way(state, blockers, now)}", blockers)
    return Outlook(Outcome.FOREIGN, _foreign(state, model))


def _in_the_way(state: SchedulerState, blockers: list[Candidate], now: float) -> str:
    """Say who is in use, or, where nobody is, who is kept for its clients and how long."""
    busy, kept = [], []
    for blocker in blockers:
        model = state.models.get(blocker.name)
        if model is None or state.busy(model.name) or model.state is not State.RESIDENT or model.waiting:
            busy.append(blocker.name)
        elif (until := kept_until(state, model)) > now:
            kept.append(f"{blocker.name} is kept for its clients for {format_duration(until - now)}")
    return f"{', '.join(busy)} in use" if busy else "; ".join(kept) or "in use"


def _foreign(state: SchedulerState, model: ModelState) -> str:
    parts = []
    for pool, need in state.wanted_bytes(model).items():
        room = state.machine_room(pool)
        if need > room:
            parts.append(f"needs {format_bytes(need)} of {pool}, the machine has {format_bytes(room)} available")
    if parts:
        return "; ".join(parts) + ": other programs use the rest"
    own = state.ledgers["ram"].bytes_of(DAEMON) if "ram" in model.need else 0
    if own > state.own_least:
        return f"needs {_amounts(model.need)}; the daemon itself takes {format_bytes(own)} for the moment"
    left = [n for n in state.models if any(ledger.bytes_of(left_of(n)) for ledger in state.ledgers.values())]
    return f"{', '.join(left)} left memory behind that is not free yet" if left else "memory is being given back"


def _amounts(amounts: dict[str, int]) -> str:
    return " and ".join(f"{format_bytes(count)} of {pool}" for pool, count in amounts.items())
