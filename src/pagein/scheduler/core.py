"""The scheduler: events and a time go in, actions with reasons come out. Pure: no clock, no I/O.

The decision list, walked after every event until nothing changes; the code carries the same numbers.

1. *Overdraft.* Where something was measured to take more than it was granted and the pool is overdrawn, idle models
   leave; where they are not enough, the one furthest over its allowance is ended, and only that one.
2. *Bound.* A request that waited longer than ``max_wait`` is refused with the reason it waited for.
3. *Grant.* A resident model takes the oldest waiting request while it has fewer leases than ``parallel``, unless it
   yields its turn (5f). So a model that became ready serves the request that loaded it before anything can evict it.
4. *Leave.* A model goes that an operator unloads, that outlived its ``keep_alive``, or that is of low priority and was
   used. One that is in use drains first. At most one unload at a time per pool.
5. *Bring in*, oldest wish first:
   a. what can never fit is refused, and nothing is evicted for it;
   b. after a failed load it waits for its back-off;
   c. what fits is loaded;
   d. if enough bytes are on their way back, it waits for them;
   e. if idle models can make room, the first of them is evicted (`residency.policy`);
   f. else it waits for models in use; after ``patience`` those yield: they take no new leases until it had its turn;
   g. or it waits for memory that other programs use, and holds nobody up.
   A model behind one of d to f is brought in only if that cannot take away the room the first one waits for.
"""

from __future__ import annotations

from pagein.errors import PageinError, ShuttingDown, WaitTooLong
from pagein.residency.lifecycle import State
from pagein.residency.policy import Candidate, choose_victims
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Grant, Kill, Load, Stop
from pagein.scheduler.intake import take_in
from pagein.scheduler.outlook import Outcome, Outlook, held_up_by, outlook
from pagein.scheduler.state import ModelState, SchedulerState, open_slots
from pagein.scheduler.words import note_reason, refuse, say, tell_waiters, why_wait
from pagein.units import format_bytes, format_duration


class Scheduler:
    """Owns the `SchedulerState`; `step` is its only act, everything else only asks."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._out: list[Action] = []

    def step(self, event: ev.Event, now: float) -> list[Action]:
        """Take one event in and return what to do, in order."""
        self._out = []
        take_in(self.state, self._out, event, now)
        while self._settle(now):
            pass
        tell_waiters(self.state, self._out, everyone=isinstance(event, ev.Ticked))
        return self._out

    def _settle(self, now: float) -> bool:
        """Walk the list once; True when something was decided that can enable more."""
        before, yielding = len(self._out), dict(self.state.yielding)
        models = list(self.state.models.values())
        self._overdraft(now)  # 1
        for model in models:
            self._bound(model, now)  # 2
            self._grant(model, now)  # 3
        for model in models:
            self._leave(model, now)  # 4
        self._bring_in(now)  # 5
        return len(self._out) > before or yielding != self.state.yielding

    def _bound(self, model: ModelState, now: float) -> None:
        while model.waiting:
            waited = now - model.waiting[0].since
            error: PageinError
            if self.state.stopping:
                error = ShuttingDown("the daemon is stopping")
            elif waited > self.state.limits.max_wait:
                error = WaitTooLong(model.name, waited, why_wait(self.state, model))
            else:
                return
            refuse(self.state, self._out, model, model.waiting.popleft(), error)

    def _can_grant(self, model: ModelState) -> bool:
        return (
            model.state is State.RESIDENT
            and not model.unload_wanted
            and model.name not in self.state.yielding
            and open_slots(self.state, model) > 0
        )

    def _grant(self, model: ModelState, now: float) -> None:
        while model.waiting and self._can_grant(model):
            waiter = model.waiting.popleft()
            self.state.leases.take(waiter.request_id, model.name)
            reason = f"{model.name} is resident; waited {format_duration(now - waiter.since)}"
            self._out.append(Grant(waiter.request_id, model.name, reason))

    def _leave(self, model: ModelState, now: float) -> None:
        if model.stopping or model.state not in (State.LOADING, State.RESIDENT, State.DRAINING):
            return
        reason = self._why_leave(model, now)
        if reason is None:
            return
        if self.state.busy(model.name):
            if model.unload_wanted and model.state is State.RESIDENT:
                model.life.move(State.DRAINING, now)
                say(self._out, model, f"draining: {reason}, {self.state.leases.count(model.name)} requests to finish")
            return
        if self.state.unload_running(self.state.held(model.name)) is None:
            self._stop(model, reason, None, now)

    def _why_leave(self, model: ModelState, now: float) -> str | None:
        if model.unload_wanted:
            return "unloaded by the operator"
        if model.state is not State.RESIDENT or model.kept or model.waiting or self.state.busy(model.name):
            return None
        idle = now - model.last_used
        if model.keep_alive is not None:
            if idle >= model.keep_alive and (model.served or model.keep_alive > 0):
                return f"idle for {format_duration(idle)}, keep_alive is {format_duration(model.keep_alive)}"
            return None
        if model.priority == "low" and model.served and idle >= self.state.limits.low_linger:
            linger = self.state.limits.low_linger
            return "low priority: used and left" + (f" after {format_duration(linger)}" if linger else "")
        return None

    def _bring_in(self, now: float) -> None:
        yielding: dict[str, str] = {}
        if not self.state.stopping:
            self._walk_wishes(yielding, now)
        self.state.yielding = yielding

    def _walk_wishes(self, yielding: dict[str, str], now: float) -> None:
        blocked: list[ModelState] = []
        for model in self.state.wishes():
            if model.retry_at is not None and now < model.retry_at:  # 5b
                note_reason(model, f"retry in {format_duration(model.retry_at - now)} after a failure")
                continue
            view = outlook(self.state, model, now)
            if view.outcome is Outcome.NEVER:  # 5a
                self._give_up(model, view)
            elif (first := held_up_by(self.state, model, blocked)) is not None:
                note_reason(model, f"{view.reason}; {first.name} was asked for before")
                blocked.append(model)
            elif view.outcome is Outcome.FITS:  # 5c
                self._load(model, view.reason, now)
            elif view.outcome is Outcome.FOREIGN:  # 5g
                note_reason(model, view.reason)
            else:
                yielding.update(self._make_way(model, view, now, first=not blocked))
                blocked.append(model)

    def _make_way(self, model: ModelState, view: Outlook, now: float, first: bool) -> dict[str, str]:
        """Steps 5d to 5f; returns who must yield to this model."""
        note_reason(model, view.reason)
        if view.outcome is Outcome.EVICT:  # 5e
            self._evict(view.victims, model, view.reason, now)
            return {v.name: model.name for v in view.victims if v.name in self.state.yielding}
        if view.outcome is Outcome.BUSY and first:  # 5f
            return self._ask_to_yield(view.victims, model, now)
        return {}

    def _load(self, model: ModelState, reason: str, now: float) -> None:
        model.life.move(State.LOADING, now)
        model.used, model.allowance, model.error = {}, dict(model.need), None
        for pool, count in model.need.items():
            self.state.ledgers[pool].reserve(model.name, count)
        self._out.append(Load(model.name, dict(model.need), note_reason(model, f"loading: {reason}")))

    def _evict(self, victims: list[Candidate], wanting: ModelState | None, why: str, now: float) -> None:
        victim = self.state.models[victims[0].name]
        if self.state.unload_running(self.state.held(victim.name)) is None:
            target = f"for {wanting.name}, which {why}" if wanting else why
            reason = f"evicted {target}: {victim.priority} priority, {victims[0].describe()}"
            self._stop(victim, reason, wanting.name if wanting else None, now)

    def _ask_to_yield(self, victims: list[Candidate], model: ModelState, now: float) -> dict[str, str]:
        """Patience counts from the oldest wish, and from the moment the models in the way got their own turn."""
        in_the_way = [self.state.models[v.name] for v in victims]
        since = max([model.oldest_wish() or now, *(m.life.since for m in in_the_way)])
        patience = self.state.limits.patience
        if now - since < patience or any(m.state is State.LOADING for m in in_the_way):
            return {}  # the turn of a model that loads has not begun
        names = ", ".join(v.name for v in victims)
        note_reason(model, f"waited longer than {format_duration(patience)}: {names} must yield its turn")
        return {v.name: model.name for v in victims}

    def _stop(self, model: ModelState, reason: str, evicted_for: str | None, now: float) -> None:
        self._send_away(model, now)
        self._out.append(Stop(model.name, note_reason(model, reason), evicted_for))

    def _kill(self, model: ModelState, reason: str, now: float) -> None:
        self._send_away(model, now)
        self._out.append(Kill(model.name, note_reason(model, f"ended: it {reason}")))

    def _send_away(self, model: ModelState, now: float) -> None:
        if model.state is not State.DRAINING:
            model.life.move(State.DRAINING, now)
        model.stopping = True
        self.state.begin_release(model.name)

    def _overdraft(self, now: float) -> None:
        for pool, ledger in self.state.ledgers.items():
            over = ledger.overdraft - self.state.coming(pool)
            if over <= 0:
                continue
            why = f"{pool} was measured {format_bytes(ledger.overdraft)} over its budget"
            idle = list(self.state.idle(now))
            victims = choose_victims(idle, {pool: over})
            liar = max(self._over_allowance(pool), key=lambda m: self._excess(m, pool), default=None)
            if victims is None and liar is not None:  # others would leave in vain
                excess = format_bytes(self._excess(liar, pool))
                self._kill(liar, f"took {excess} of {pool} beyond its allowance; {why}, and too little is idle", now)
            elif victims or (victims := [c for c in idle if c.bytes.get(pool)]):
                self._evict(victims, None, f"because {why}", now)

    def _over_allowance(self, pool: str) -> list[ModelState]:
        present = (State.LOADING, State.RESIDENT, State.DRAINING)
        return [
            m for m in self.state.models.values() if m.state in present and not m.stopping and self._excess(m, pool) > 0
        ]

    def _excess(self, model: ModelState, pool: str) -> int:
        return self.state.ledgers[pool].bytes_of(model.name) - model.allowance.get(pool, 0)

    def _give_up(self, model: ModelState, view: Outlook) -> None:
        assert view.error is not None
        while model.waiting:
            refuse(self.state, self._out, model, model.waiting.popleft(), view.error)
        if model.wanted_since is not None:
            model.wanted_since = None
            model.error = view.error
            say(self._out, model, view.reason)
