"""What the scheduler can do: each act changes the state and leaves an action with its reason."""

from __future__ import annotations

from pagein.errors import LoadFailed, ModelNotFound, NoRoom, PageinError
from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate
from pagein.scheduler.actions import Action, Deny, Give, Kill, Load, Renewed, Sleep, Stop, Wake
from pagein.scheduler.state import PRESENT, ModelState, SchedulerState
from pagein.scheduler.turns import note_eviction
from pagein.scheduler.words import note_reason, refuse, say
from pagein.units import format_bytes, format_duration


class Acts:
    """Acts on one state; what they leave is appended to ``out``."""

    def __init__(self, state: SchedulerState, out: list[Action]) -> None:
        self.state, self.out = state, out

    def bring_in(self, model: ModelState, reason: str, now: float) -> None:
        """Load it, wake it, or give an outsider its memory; its bytes are free."""
        if model.outsider:
            self._give(model, reason, now)
            return
        asleep = model.state is State.ASLEEP
        model.life.move(State.LOADING, now)
        model.allowance, model.error = dict(model.need), None
        for pool, count in model.need.items():
            ledger = self.state.ledgers[pool]
            if asleep:
                ledger.reserve_more(model.name, count)
            else:
                ledger.reserve(model.name, count)
        if asleep:
            self.out.append(Wake(model.name, dict(model.need), note_reason(model, f"waking: {reason}")))
        else:
            model.used = {}
            self.out.append(Load(model.name, dict(model.need), note_reason(model, f"loading: {reason}")))

    def _give(self, room: ModelState, reason: str, now: float) -> None:
        room.life.move(State.LOADING, now)
        for pool, count in room.need.items():
            self.state.ledgers[pool].reserve(room.name, count)
            self.state.ledgers[pool].confirm(room.name)
        room.life.move(State.RESIDENT, now)
        room.wanted_since = None
        self.out.append(Give(room.name, note_reason(room, reason)))

    def deny(self, room: ModelState, why: str) -> None:
        """Refuse an outsider; it is forgotten."""
        del self.state.rooms[room.name]
        (pool, count), *_ = room.need.items()
        error = NoRoom(
            f"{format_bytes(count)} of {pool} cannot be given: {why}",
            pool=pool,
            need_bytes=count,
            budget_bytes=self.state.ledgers[pool].budget if pool in self.state.ledgers else 0,
        )
        self.out.append(Deny(room.name, error))

    def evict(self, victims: list[Candidate], wanting: ModelState | None, why: str, now: float) -> None:
        """Send the first of the victims away, unless something leaves its pools already."""
        victim = self.state.models[victims[0].name]
        if self.state.unload_running(self.state.held(victim.name)) is not None:
            return
        target = f"for {wanting.name}, which {why}" if wanting else why
        reason = f"evicted {target}: {victim.priority} priority, {victims[0].describe()}"
        if wanting is not None:
            note_eviction(self.state, victim, wanting.name)
        if wanting is not None and victim.sleeps and victim.state is State.RESIDENT:
            self._send_away(victim, now)
            self.out.append(Sleep(victim.name, note_reason(victim, f"sleeps instead: {reason}"), wanting.name))
        else:
            self.stop(victim, reason, wanting.name if wanting else None, now)

    def stop(self, model: ModelState, reason: str, evicted_for: str | None, now: float) -> None:
        """End a worker that nobody uses."""
        self._send_away(model, now)
        self.out.append(Stop(model.name, note_reason(model, reason), evicted_for))

    def kill(self, model: ModelState, error: PageinError, now: float) -> None:
        """End a worker although it may be in use."""
        self._send_away(model, now)
        self.out.append(Kill(model.name, note_reason(model, f"ended: {error.message}"), error))

    def _send_away(self, model: ModelState, now: float) -> None:
        if model.state is not State.DRAINING:
            model.life.move(State.DRAINING, now)
        model.stopping = True
        self.state.begin_release(model.name)

    def fail(self, model: ModelState, error: PageinError, now: float, *, refuse_waiting: bool) -> None:
        """Count a failure and begin the back-off; those who wait are refused, or wait for the next try."""
        limits = self.state.limits
        model.failures += 1
        model.error = error
        pause = min(limits.backoff_max, limits.backoff_first * 2.0 ** min(model.failures - 1, 30))
        model.retry_at = now + pause
        say(self.out, model, f"{error.message}; next try in {format_duration(pause)} at the earliest")
        if refuse_waiting:
            if model.priority != "high":
                model.wanted_since = None
            self.refuse_all(model, error)

    def refuse_all(self, model: ModelState, error: PageinError) -> None:
        """End every request that waits for it."""
        while model.waiting:
            refuse(self.state, self.out, model, model.waiting.popleft(), error)

    def give_way(self, model: ModelState) -> None:
        """It leaves once its leases end; what is absent takes its new settings at once."""
        if model.state in (State.ABSENT, State.FAILED):
            self.renew(model)
        else:
            model.unload_wanted = model.state in PRESENT

    def renew(self, model: ModelState) -> None:
        """A model that is absent takes its new settings, or goes for good."""
        state = self.state
        if model.removed:
            del state.models[model.name]
            self.refuse_all(model, ModelNotFound(model.name, list(state.models)))
            self.out.append(Renewed(model.name, True, "gone from the configuration"))
            return
        fresh = model.successor
        assert fresh is not None
        fresh.waiting, fresh.wanted_since, fresh.speculative = model.waiting, model.wanted_since, model.speculative
        fresh.pinned, fresh.pin_wished = fresh.pinned or model.pin_wished, model.pin_wished
        fresh.heat, fresh.uses, fresh.loads, fresh.last_used = model.heat, model.uses, model.loads, model.last_used
        state.models[model.name] = fresh
        self.out.append(Renewed(model.name, False, note_reason(fresh, "has its new settings")))
        if fresh.problem is not None:
            fresh.wanted_since = None
            fresh.error = LoadFailed(f"model {fresh.name!r} cannot be served: {fresh.problem}")
            self.refuse_all(fresh, fresh.error)
