"""The scheduler: events and a time go in, actions with reasons come out. Pure: no clock, no I/O.

The decision list, walked after every event until nothing changes; the code carries the same numbers.

1. *Trouble* (`trouble`). Who outgrew its allowance is ended, and reserves more next time. Where a pool is overdrawn or
   other programs took what was promised, idle models leave. Under tight pressure idle models of low priority leave,
   under critical pressure idle ones, one by one.
2. *Bound.* A request that waited longer than ``max_wait`` is refused with the reason it waited for.
3. *Grant.* A resident model takes the oldest waiting request while it has fewer leases than ``parallel``, unless it
   yields its turn (5f), is taken for hung, or is heavy and another heavy model of its device computes or was asked
   before. So a model that became ready serves the request that loaded it before anything can evict it.
4. *Leave.* A model goes that an operator unloads, whose settings changed, that hangs, that outlived its
   ``keep_alive``, or that is of low priority and was used. One that is in use drains first. At most one unload at a
   time per pool.
5. *Bring in*, oldest wish first:
   a. what can never fit is refused, and nothing is evicted for it;
   b. after a failed load it waits for its back-off; a load that nobody waits for, for the end of pressure;
   c. what fits is loaded;
   d. if enough bytes are on their way back, it waits for them;
   e. if idle models can make room, the first of them is evicted (`residency.policy`); one that is kept for its clients
      (`turns`) is not idle yet;
   f. else it waits for models in use; after ``patience`` those yield: they take no new leases until it had its turn;
   g. or it waits for memory that other programs use, and holds nobody up.
   A model behind one of d to f is brought in only if that cannot take away the room the first one waits for.
"""

from __future__ import annotations

from pagein.errors import PageinError, ShuttingDown, WaitTooLong, WorkerHung
from pagein.memory.pressure import PressureLevel
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Action, Grant
from pagein.scheduler.acts import Acts
from pagein.scheduler.intake import take_in
from pagein.scheduler.outlook import Outcome, Outlook, held_up_by, kept_bytes, outlook
from pagein.scheduler.state import PRESENT, ModelState, SchedulerState, open_slots
from pagein.scheduler.trouble import end_liars, relieve_overdraft, relieve_pressure, settle_for_less
from pagein.scheduler.turns import computes_before, kept_until
from pagein.scheduler.words import note_reason, refuse, say, tell_waiters, why_wait
from pagein.units import format_bytes, format_duration


class Scheduler:
    """Owns the `SchedulerState`; `step` is its only act, everything else only asks."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state
        self._out: list[Action] = []
        self._acts = Acts(state, self._out)

    @property
    def decided(self) -> list[Action]:
        """What the last step decided, also where a fault ended it half-way: the state has moved, so it must be done."""
        return self._out

    def step(self, event: ev.Event, now: float) -> list[Action]:
        """Take one event in and return what to do, in order."""
        self._out = []
        self._acts = Acts(self.state, self._out)
        self.state.now = now
        take_in(self._acts, event, now)
        while self._settle(now):
            pass
        tell_waiters(self.state, self._out, everyone=isinstance(event, ev.Ticked))
        return self._out

    def _settle(self, now: float) -> bool:
        """Walk the list once; True when something was decided that can enable more."""
        before, yielding = len(self._out), dict(self.state.yielding)
        self.state.wake_at = None
        settle_for_less(self.state)
        end_liars(self._acts, now)  # 1
        relieve_overdraft(self._acts, now)
        relieve_pressure(self._acts, now)
        models = list(self.state.models.values())
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
            and not model.hung
            and model.name not in self.state.yielding
            and open_slots(self.state, model) > 0
            and computes_before(self.state, model) is None
        )

    def _grant(self, model: ModelState, now: float) -> None:
        while model.waiting and self._can_grant(model):
            waiter = model.waiting.popleft()
            if not self.state.busy(model.name):
                model.turn_since = now
            self.state.leases.take(waiter.request_id, model.name)
            self.state.granted_at[waiter.request_id] = now
            if waiter.keep_alive is not None:
                model.wished_keep = waiter.keep_alive
            reason = f"{model.name} is resident; waited {format_duration(now - waiter.since)}"
            self._out.append(Grant(waiter.request_id, model.name, reason))

    def _leave(self, model: ModelState, now: float) -> None:
        if model.stopping or model.state not in PRESENT:
            return
        reason = self._why_leave(model, now)
        if reason is None:
            return
        if self.state.busy(model.name):
            if model.unload_wanted and model.state is State.RESIDENT:
                model.life.move(State.DRAINING, now)
                say(self._out, model, f"draining: {reason}, {self.state.leases.count(model.name)} requests to finish")
            return
        if model.hung is not None:
            error = WorkerHung(model.hung, model=model.name)
            self._acts.kill(model, error, now)
            self._acts.fail(model, error, now, refuse_waiting=False)
        elif self.state.unload_running(self.state.held(model.name)) is None:
            self._acts.stop(model, reason, None, now)

    def _why_leave(self, model: ModelState, now: float) -> str | None:
        if model.hung is not None:
            return model.hung
        if model.unload_wanted:
            edited = "it is gone from the configuration" if model.removed else "its configuration was edited"
            return edited if model.removed or model.successor else "unloaded by the operator"
        if model.state is not State.RESIDENT or model.kept or model.waiting or self.state.busy(model.name):
            return None
        idle, bound = now - model.last_used, model.idle_bound
        if bound is not None:
            if idle >= bound and (model.served or bound > 0):
                return f"idle for {format_duration(idle)}, keep_alive is {format_duration(bound)}"
            if bound > 0:
                self._wake(model.last_used + bound, now)
            return None
        if model.priority == "low" and model.served and idle >= self.state.limits.low_linger:
            linger = self.state.limits.low_linger
            return "low priority: used and left" + (f" after {format_duration(linger)}" if linger else "")
        return None

    def _wake(self, at: float, now: float) -> None:
        """Decide again then, though no event may tell."""
        known = self.state.wake_at
        if at > now and at != float("inf"):
            self.state.wake_at = at if known is None else min(known, at)

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
                self._wake(model.retry_at, now)
                continue
            if self._must_not_hurry(model):
                signs = "; ".join(self.state.pressure.signs) or "it was a moment ago"
                note_reason(model, f"nobody waits for it, and memory is {self.state.pressure.level}: {signs}")
                continue
            view = outlook(self.state, model, now)
            if view.outcome is Outcome.NEVER:  # 5a
                self._give_up(model, view)
            elif (first := held_up_by(self.state, model, blocked)) is not None:
                note_reason(model, f"{view.reason}; {first.name} was asked for before")
                blocked.append(model)
            elif view.outcome is Outcome.FITS:  # 5c
                self._acts.bring_in(model, view.reason, now)
            elif view.outcome is Outcome.FOREIGN:  # 5g
                note_reason(model, view.reason)
            else:
                yielding.update(self._make_way(model, view, now, first=not blocked))
                blocked.append(model)

    def _must_not_hurry(self, model: ModelState) -> bool:
        calm = self.state.pressure.level is PressureLevel.CALM
        return model.speculative and not model.waiting and not calm

    def _make_way(self, model: ModelState, view: Outlook, now: float, first: bool) -> dict[str, str]:
        """Steps 5d to 5f; returns who must yield to this model."""
        note_reason(model, view.reason)
        if view.outcome is Outcome.EVICT:  # 5e
            self._acts.evict(view.victims, model, view.reason, now)
            return {v.name: model.name for v in view.victims if v.name in self.state.yielding}
        if view.outcome is Outcome.BUSY and first:  # 5f
            for victim in view.victims:
                if (there := self.state.models.get(victim.name)) is not None:
                    self._wake(kept_until(self.state, there), now)
            return self._ask_to_yield(model, view, now)
        return {}

    def _ask_to_yield(self, model: ModelState, view: Outlook, now: float) -> dict[str, str]:
        """Patience counts from the oldest wish, and from the moment the models in the way got their own turn."""
        in_the_way = [m for v in view.victims if (m := self.state.models.get(v.name)) is not None]
        if len(in_the_way) < len(view.victims):
            return {}  # an outsider's lease cannot yield, and the others would in vain
        since = max([model.oldest_wish() or now, *(m.life.since for m in in_the_way)])
        patience = self.state.limits.patience
        if now - since < patience or any(m.state is State.LOADING for m in in_the_way):
            self._wake(since + patience, now)
            return {}  # the turn of a model that loads has not begun
        names = ", ".join(v.name for v in view.victims)
        note_reason(model, f"waited longer than {format_duration(patience)}: {names} must yield its turn")
        return {v.name: model.name for v in view.victims}

    def _give_up(self, model: ModelState, view: Outlook) -> None:
        assert view.error is not None
        if model.outsider:
            (pool,) = model.need
            kept, names = kept_bytes(self.state, pool, model.name)
            most = format_bytes(max(0, self.state.ledgers[pool].budget - kept))
            self._acts.deny(model, f"the budget can give at most {most}, with {', '.join(names) or 'nothing'} kept")
            return
        self._acts.refuse_all(model, view.error)
        if model.wanted_since is not None:
            model.wanted_since = None
            model.error = view.error
            say(self._out, model, view.reason)
