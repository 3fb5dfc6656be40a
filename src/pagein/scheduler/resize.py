"""The allowance of a worker that lives: less when it has given bytes back, more before it takes any. Pure."""

from __future__ import annotations

from pagein.errors import InUse, NoRoom, PageinError
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Resize, Retain
from pagein.scheduler.acts import Acts
from pagein.scheduler.state import ModelState
from pagein.scheduler.words import note_reason, say
from pagein.units import format_bytes

POOL = "ram"


def want(acts: Acts, event: ev.ResizeWanted) -> None:
    """Reserve what it is to have more, and have its worker told; or refuse and change nothing."""
    model = acts.state.models.get(event.model)
    error = None if model is None else _objection(acts, model, event.bytes)
    if model is None or error is not None:
        acts.out.append(Retain(event.model, error or InUse(f"model {event.model!r} is gone", model=event.model)))
        return
    had, ledger = model.allowance.get(POOL, 0), acts.state.ledgers[POOL]
    ledger.resize(model.name, max(event.bytes, ledger.bytes_of(model.name)))
    model.resizing = True
    why = f"its allowance changes from {format_bytes(had)} to {format_bytes(event.bytes)} of {POOL}, by the operator"
    acts.out.append(Resize(model.name, {**model.allowance, POOL: event.bytes}, note_reason(model, why)))


def _objection(acts: Acts, model: ModelState, count: int) -> PageinError | None:
    if not model.adjusts:
        return InUse(f"model {model.name!r} takes what it takes: its engine cannot stream", model=model.name)
    if model.state is not State.RESIDENT or model.unload_wanted:
        return InUse(
            f"model {model.name!r} is {model.state}; only that of a loaded model can change",
            hint="set `memory` of the model for its next load",
            model=model.name,
        )
    if model.resizing:
        return InUse(f"the allowance of {model.name!r} is being changed already", model=model.name)
    more = count - acts.state.ledgers[POOL].bytes_of(model.name)
    free = acts.state.free(POOL)
    if more > free:
        return NoRoom(
            f"model {model.name!r} cannot have {format_bytes(more)} more of {POOL}: {format_bytes(free)} is free",
            pool=POOL,
            need_bytes=more,
            free_bytes=free,
        )
    return None


def settle(acts: Acts, event: ev.Resized, now: float) -> None:
    """The worker keeps to it, or refused: the ledger says what is true. What ended meanwhile was settled by its end."""
    model = acts.state.models.get(event.model)
    if model is None or not model.resizing:
        return
    model.resizing = False
    if event.error is None:
        model.allowance, model.resized_at = dict(event.allowance), now
        say(acts.out, model, f"its allowance is {format_bytes(model.allowance[POOL])} of {POOL} now")
    else:
        say(acts.out, model, f"its allowance stays: {event.error.message}")
    if model.state is State.RESIDENT and not model.stopping:
        held = max(model.allowance.get(POOL, 0), model.used.get(POOL, 0))
        acts.state.ledgers[POOL].resize(model.name, held)
