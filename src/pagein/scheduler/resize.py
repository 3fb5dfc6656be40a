"""The allowance of a worker that lives: less when it has given bytes back, more before it takes any. Pure.

An operator sets it until the model is unloaded; an edited `memory` is tried so first, and reloads where it is refused.
"""

from __future__ import annotations

from pagein.errors import InUse, NoRoom, PageinError
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Renewed, Resize, Retain
from pagein.scheduler.acts import Acts
from pagein.scheduler.state import PRESENT, ModelState
from pagein.scheduler.trouble import GUESSED
from pagein.scheduler.words import note_reason, say
from pagein.units import format_bytes


def want(acts: Acts, event: ev.ResizeWanted) -> None:
    """Reserve what it is to have more, and have its worker told; or refuse and change nothing."""
    model = acts.state.models.get(event.model)
    error = None if model is None else _objection(acts, model, event.bytes, event.pool)
    if model is None or error is not None:
        acts.out.append(Retain(event.model, error or InUse(f"model {event.model!r} is gone", model=event.model)))
        return
    _begin(acts, model, event.bytes, "by the operator")


def edit(acts: Acts, model: ModelState, fresh: ModelState) -> bool:
    """Let a model live on with edited bytes; False, and nothing changed, where it must leave for them."""
    pool, count = model.pool, fresh.need.get(model.pool, 0)
    same_beside = {**fresh.need, pool: 0} == {**model.need, pool: 0}
    if fresh.problem is not None or model.successor is not None or not (fresh.adjusts and same_beside):
        return False
    if _objection(acts, model, count) is not None:
        return False
    model.edit = fresh
    if count == model.allowance.get(pool):
        _take_edit(acts, model)
    else:
        _begin(acts, model, count, "as its configuration was edited")
    return True


def stands(acts: Acts, model: ModelState, fresh: ModelState) -> bool:
    """Keep what somebody set, though others' changes leave a model other bytes: those count from its next load on."""
    lives = model.state in PRESENT and model.successor is None and not model.removed
    if model.usual_need is None or not lives or fresh.problem is not None:
        return False
    model.need = {**fresh.need, model.pool: model.need[model.pool]}
    model.usual_need, model.need_source = dict(fresh.need), fresh.need_source
    why = f"keeps {format_bytes(model.need[model.pool])} of {model.pool} that were set until it is unloaded"
    acts.out.append(Renewed(model.name, False, note_reason(model, why), lives=True))
    return True


def hold(model: ModelState, count: int | None) -> None:
    """Count a worker's own allowance as its need until it is unloaded: it was set, and outlived who set it."""
    usual = model.usual_need or model.need
    if count is None:
        return
    model.need = {**usual, model.pool: count}
    model.usual_need = None if model.need == usual else dict(usual)


def forget(model: ModelState) -> None:
    """Its worker ended: what was configured counts again, and an edit that it did not live to see."""
    model.resizing_to = None
    if model.edit is not None:
        model.successor, model.edit = model.edit, None
    if model.usual_need is not None and model.need_source != GUESSED:
        model.need = model.usual_need
    model.usual_need = None


def _begin(acts: Acts, model: ModelState, count: int, why: str) -> None:
    pool = model.pool
    had, ledger = model.allowance.get(pool, 0), acts.state.ledgers[pool]
    ledger.resize(model.name, max(count, ledger.bytes_of(model.name)))
    model.resizing_to = count
    said = f"its allowance changes from {format_bytes(had)} to {format_bytes(count)} of {pool}, {why}"
    acts.out.append(Resize(model.name, {**model.allowance, pool: count}, note_reason(model, said), pool))


def _objection(acts: Acts, model: ModelState, count: int, named: str | None = None) -> PageinError | None:
    pool = model.pool
    if not model.adjusts:
        return InUse(f"model {model.name!r} takes what it takes: its engine cannot stream", model=model.name)
    if named not in (None, pool):
        text = f"of model {model.name!r} only what it has of {pool} can change, not of {named}"
        return InUse(text, model=model.name, pool=pool)
    if model.state is not State.RESIDENT or model.unload_wanted:
        return InUse(
            f"model {model.name!r} is {model.state}; only that of a loaded model can change",
            hint="set `memory` of the model for its next load",
            model=model.name,
        )
    if model.resizing:
        return InUse(f"the allowance of {model.name!r} is being changed already", model=model.name)
    more = count - acts.state.ledgers[pool].bytes_of(model.name)
    free = acts.state.free(pool)
    if more > free:
        return NoRoom(
            f"model {model.name!r} cannot have {format_bytes(more)} more of {pool}: {format_bytes(free)} is free",
            pool=pool,
            need_bytes=more,
            free_bytes=free,
        )
    return None


def settle(acts: Acts, event: ev.Resized, now: float) -> None:
    """The worker keeps to it, or refused: the ledger says what is true. What ended meanwhile was settled by its end."""
    model = acts.state.models.get(event.model)
    if model is None or not model.resizing:
        return
    model.resizing_to, pool = None, model.pool
    if event.error is None:
        model.allowance, model.resized_at = dict(event.allowance), now
        plan = f": {event.plan[0]}" if event.plan else ""
        say(acts.out, model, f"its allowance is {format_bytes(model.allowance[pool])} of {pool} now{plan}")
    else:
        say(acts.out, model, f"its allowance stays: {event.error.message}")
    if model.state is State.RESIDENT and not model.stopping:
        held = max(model.allowance.get(pool, 0), model.used.get(pool, 0))
        acts.state.ledgers[pool].resize(model.name, held)
    if model.edit is None:
        if event.error is None:
            hold(model, model.allowance[pool])
    elif event.error is None:
        _take_edit(acts, model)
    else:
        _leave_for_edit(acts, model, now)


def _take_edit(acts: Acts, model: ModelState) -> None:
    """It has what was edited, and goes on."""
    fresh, model.edit = model.edit, None
    assert fresh is not None
    model.need, model.need_source, model.usual_need = dict(fresh.need), fresh.need_source, None
    why = f"has its new settings while it lives: {format_bytes(model.need[model.pool])} of {model.pool}"
    acts.out.append(Renewed(model.name, False, note_reason(model, why), lives=True))


def _leave_for_edit(acts: Acts, model: ModelState, now: float) -> None:
    """Its worker refused: it is loaded anew with them."""
    model.successor, model.edit = model.edit, None
    acts.give_way(model)
    if model.priority == "high" and model.wanted_since is None:
        model.wanted_since, model.speculative = now, True
