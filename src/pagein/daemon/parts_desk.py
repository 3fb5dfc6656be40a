"""The split models as the gateway sees them: shows their parts, and has workers act on them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from pagein.catalog.split.facts import TaskFacts
from pagein.catalog.split.names import fold
from pagein.daemon.fleet import Fleet
from pagein.daemon.inbox import Inbox
from pagein.daemon.parts_watch import PartsWatch
from pagein.daemon.parts_worker import NoAnswer
from pagein.daemon.rollouts import Rollout, Rollouts
from pagein.daemon.roster import Roster
from pagein.errors import BadAnswer, BadRequest, LoadFailed, ModelNotFound, NotLoaded, UnknownPart, WaitTooLong
from pagein.gateway.parts_ports import LazyView, PartsView
from pagein.protocol import Endpoint
from pagein.residency.lifecycle import State

QUICK = 0.4
"""Seconds that an answer about parts waits for workers."""
EXIT_NOTICE = 2.0
"""Seconds that a broken connection waits for the news that the worker has ended."""


class SplitDesk:
    """Implements `pagein.gateway.parts_ports.SplitModels`."""

    def __init__(
        self,
        roster: Roster,
        inbox: Inbox,
        fleet: Fleet,
        watch: PartsWatch,
        rollouts: Rollouts,
        load: Callable[[str], Awaitable[None]],
    ) -> None:
        """``load`` brings a model in, as `Desk.load` does."""
        self._roster, self._inbox, self._fleet = roster, inbox, fleet
        self._watch, self._rollouts, self._load = watch, rollouts, load

    def tasks(self, model: str) -> Mapping[str, TaskFacts] | None:
        """What a model can be asked for; None where it is not split."""
        return self._watch.tasks(model)

    async def look(self) -> dict[str, LazyView]:
        """Every split model as it is now; see `SplitModels.look`."""
        names = self._watch.names()
        await self._watch.look(names, QUICK)
        return {name: LazyView(self._state(name).value, self._view(name)) for name in self._watch.names()}

    async def view(self, model: str) -> PartsView:
        """One of them."""
        self._check(model)
        await self._watch.look([model], QUICK)
        return self._view(model)

    async def act(self, model: str, wish: Mapping[str, object]) -> PartsView:
        """Have the worker do it; see `SplitModels.act`."""
        self._check(model)
        part = wish.get("load")
        if part is not None and self._state(model) is not State.RESIDENT:
            self._check_part(model, part)
            await self._load(model)
        verb = next(iter(wish))
        return await self._tell(model, wish, f"only the parts of a loaded model can be told to {verb}")

    async def set_rollout(self, model: str, level: str | None, percent: float | None) -> PartsView:
        """Tell the worker, where there is one, and those after it; see `SplitModels.set_rollout`."""
        self._check(model)
        if self._state(model) is State.LOADING:
            await self._load(model)  # it began with the roll-out of before
        before = self._rollouts.of(model)
        wanted = Rollout(before.level if level is None else level, before.percent if percent is None else percent)
        if self._endpoint(model) is not None:
            given = {"level": level, "percent": percent}
            wish = {"rollout": {name: value for name, value in given.items() if value is not None}}
            try:
                told = await self._tell(model, wish, "it left at that moment")
            except WaitTooLong:
                self._rollouts.remember(model, wanted)  # it is at it
                raise
            wanted = Rollout(told.level, told.percent)
        self._rollouts.remember(model, wanted)
        return self._view(model)

    # ── inside ──────────────────────────────────────────────────────────────────────────────────

    async def _tell(self, model: str, wish: Mapping[str, object], why_not: str) -> PartsView:
        endpoint = self._endpoint(model)
        if endpoint is None:
            raise NotLoaded(model, self._state(model).value, why_not)
        bound = self._roster.settings.scheduler.max_wait
        try:
            return await self._watch.tell(model, endpoint, wish, bound)
        except NoAnswer as silent:
            if silent.late:
                raise WaitTooLong(model, bound, "its worker is still at it") from None
            error = await self._fleet.why_ended(model, endpoint, EXIT_NOTICE)
            if error is not None:
                raise error from None
            raise LoadFailed(f"the worker of {model!r} could not be told: {silent}") from None
        except BadAnswer as error:
            raise error.retold(f"the worker of {model!r}: {error.message}") from None

    def _endpoint(self, model: str) -> Endpoint | None:
        """Where its worker answers; None where it has none that serves."""
        ready = self._fleet.ready(model)
        return ready.endpoint if ready is not None and self._state(model) is State.RESIDENT else None

    def _check(self, model: str) -> None:
        models = self._inbox.scheduler.state.models
        if model not in models:
            raise ModelNotFound(model[:64], list(models))
        if self._watch.tasks(model) is None:
            problem = self._roster.entries[model].problem
            if problem is not None:
                raise LoadFailed(f"model {model!r} cannot be served: {problem}")
            raise BadRequest(f"model {model!r} is not split: it has no parts", param="model")

    def _check_part(self, model: str, part: object) -> None:
        """Load no model for a part that it does not have."""
        facts = self._roster.entries[model].split
        known = dict.fromkeys((*(one.name for one in self._view(model).parts), *(facts.parts if facts else ())))
        if fold(part) not in known:
            raise UnknownPart(part, list(known))

    def _state(self, model: str) -> State:
        return self._inbox.scheduler.state.models[model].state

    def _view(self, model: str) -> PartsView:
        view = self._watch.view(model)
        assert view is not None, model
        return view
