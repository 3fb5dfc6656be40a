"""Which edits reload a model, and which it lives through: from the file to its worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from pagein.catalog.model import Need, NeedSource
from pagein.catalog.split.facts import PartFacts, SplitFacts, TaskFacts
from pagein.config.schema import Settings
from pagein.daemon import fleet as fleet_module
from pagein.daemon import reload as module
from pagein.daemon import states
from pagein.daemon.reload import Reloader
from pagein.errors import DoesNotFit, InUse
from pagein.memory.budget import PoolBudget
from pagein.protocol import Capability
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev

from .lab import MIB, Lab


class Edited:
    """A lab whose model ``big`` streams, its reloader, and workers that are told other bytes."""

    def __init__(self, lab: Lab, monkeypatch: Any) -> None:
        self.lab, self.told, self.refuses = lab, [], False
        self.fresh = lab.settings
        self.budget = lab.budgets["ram"].bytes
        for name in ("big", "other"):
            lab.entries[name] = self._entry(name, lab.settings)
        for name, entry in lab.entries.items():
            lab.state.models[name] = states.model_state(lab.settings, entry, lab.peaks)
        monkeypatch.setattr(module, "read_machine", lab.read_machine)
        monkeypatch.setattr(module, "resolve_budgets", lambda *_: {"ram": PoolBudget("ram", self.budget, "configured")})
        monkeypatch.setattr(module, "resolve", lambda name, model, *_: self._entry(name, self.fresh))
        monkeypatch.setattr(fleet_module, "resize", self._resize)
        self.reloader = Reloader(lambda: self.fresh, lab.roster, lab.inbox, lab.budgets, lab.peaks, frozenset())

    def _entry(self, name: str, settings: Settings) -> Any:
        whole, memory = 400 * MIB, settings.models[name].memory
        declared = Need({"ram": memory or whole}, NeedSource.DECLARED if memory else NeedSource.ESTIMATED, "test")
        least = 50 * MIB if name == "big" else None
        return replace(self.lab.entries[name], estimate=declared, need=declared, least=least)

    async def _resize(self, action: Any, worker: Any, *_: Any) -> ev.Resized:
        self.told.append(action.allowance["ram"] // MIB)
        if self.refuses:
            return ev.Resized(action.model, action.allowance, DoesNotFit(90 * MIB, 80 * MIB, {"runtime": 90 * MIB}, ""))
        worker.allowance = dict(action.allowance)
        return ev.Resized(action.model, action.allowance, plan=("a plan",))

    async def edit(self, name: str = "big", **changes: Any) -> Any:
        """Write the file anew and apply it."""
        model = self.fresh.models[name].model_copy(update=changes)
        self.fresh = self.fresh.model_copy(update={"models": {**self.fresh.models, name: model}})
        view = await self.reloader.reload()
        await self.lab.settle()
        return view

    @property
    def big(self) -> Any:
        """What the scheduler knows of it."""
        return self.lab.model("big")


@pytest.fixture
def edited(make_lab, monkeypatch):
    """Make the scene; ``memory`` is that of the file at first."""

    def make(memory: int | None = 300 * MIB, budget: int = 1000 * MIB) -> Edited:
        given = {"memory": memory} if memory is not None else {}
        return Edited(make_lab(budget, big=given, other={}), monkeypatch)

    return make


async def test_edited_memory_reaches_the_worker_that_lives(edited):
    """The same process serves on; settings, catalog and ledger have the new figure, and its record of capabilities."""
    scene = edited()
    child = await scene.lab.resident("big")
    view = await scene.edit(memory=200 * MIB)
    assert view.changed == ["big"]
    assert scene.told == [200]
    assert (scene.big.state, scene.big.need, scene.big.allowance) == (State.RESIDENT, *[{"ram": 200 * MIB}] * 2)
    assert scene.lab.roster.models["big"].memory == 200 * MIB
    assert scene.lab.roster.entries["big"].need.bytes == {"ram": 200 * MIB}
    assert scene.lab.roster.coming == {}
    assert not child.ended
    assert scene.lab.fleet.last_ready("big") is child.ready


async def test_a_refusal_reloads_it(edited):
    """The worker leaves, and the next load has what the file says."""
    scene = edited()
    child = await scene.lab.resident("big")
    scene.refuses = True
    await scene.edit(memory=80 * MIB)
    assert child.ended
    assert scene.big.need == {"ram": 80 * MIB}
    assert scene.lab.roster.models["big"].memory == 80 * MIB


@pytest.mark.parametrize("changes", [{"queue": 3}, {"memory": 200 * MIB, "queue": 3}])
async def test_any_other_edit_reloads_it(edited, changes):
    """Also one that comes with new memory."""
    scene = edited()
    child = await scene.lab.resident("big")
    await scene.edit(**changes)
    assert scene.told == []
    assert child.ended


async def test_a_model_that_takes_what_it_takes_reloads(edited):
    """Its engine cannot live with other bytes."""
    scene = edited()
    child = await scene.lab.resident("other")
    await scene.edit("other", memory=200 * MIB)
    assert (scene.told, child.ended) == ([], True)


async def test_what_others_leave_it_is_taken_while_it_lives(edited):
    """A pinned neighbour takes more, so that it has to stream: no process ends for that."""
    scene = edited(memory=None)
    child = await scene.lab.resident("big")
    scene.budget = 300 * MIB
    view = await scene.edit("other", memory=100 * MIB, pin=True)
    assert view.unchanged == ["big"]
    (count,) = scene.told
    assert scene.big.allowance == {"ram": count * MIB} | scene.big.allowance
    assert count < 150
    assert not child.ended


async def test_what_an_operator_set_stands_until_it_is_unloaded(edited):
    """A reload that leaves it other bytes does not take them; the worker after this one gets those."""
    scene = edited(memory=None)
    child = await scene.lab.resident("big")
    assert await scene.lab.desk.set_allowance("big", 250 * MIB) == ("a plan",)
    scene.budget = 300 * MIB
    await scene.edit("other", memory=100 * MIB, pin=True)
    assert scene.told == [250]
    assert scene.big.allowance == {"ram": 250 * MIB}
    assert scene.lab.roster.coming == {}
    configured = scene.lab.roster.entries["big"].need.bytes
    (told,) = [one for one in scene.lab.desk.status().models if one.name == "big"]
    assert told.need == {"ram": 250 * MIB}
    assert told.need_explanation.startswith("set until it is unloaded; then ")
    await scene.lab.desk.unload("big")
    assert child.ended
    assert scene.big.need == configured


async def test_a_second_edit_while_the_worker_is_told_waits_for_its_end(edited, monkeypatch):
    """It takes the first, and leaves for the second."""
    scene = edited()
    child = await scene.lab.resident("big")
    gate = asyncio.Event()
    answer = scene._resize

    async def slowly(*given: Any) -> ev.Resized:
        await gate.wait()
        return await answer(*given)

    monkeypatch.setattr(fleet_module, "resize", slowly)
    await scene.edit(memory=200 * MIB)
    with pytest.raises(InUse, match="being changed already"):
        await scene.lab.desk.set_allowance("big", 100 * MIB)
    await scene.edit(memory=150 * MIB)
    gate.set()
    await scene.lab.settle()
    assert child.ended
    assert scene.big.need == {"ram": 150 * MIB}
    assert scene.lab.roster.models["big"].memory == 150 * MIB


# ── split models ────────────────────────────────────────────────────────────────────────────


def _split(*tasks: str) -> SplitFacts:
    does = frozenset({Capability.EMBEDDING})
    facts = {name: TaskFacts("embed", ("backbone",), does) for name in tasks}
    return SplitFacts("".join(tasks), facts, {"backbone": PartFacts("backbone", {"stored": 5 * MIB}, tasks)})


async def test_a_plan_that_changed_is_read_where_the_model_is_not_loaded(edited, monkeypatch):
    """New tasks of a split model can be asked for after a reload, though its settings are the same."""
    scene = edited()
    scene.lab.entries["big"] = replace(scene.lab.entries["big"], split=_split("a"))
    found = _split("a")
    monkeypatch.setattr(
        module, "resolve", lambda name, model, *_: replace(scene._entry(name, scene.fresh), split=found)
    )
    assert (await scene.reloader.reload()).changed == []
    found = _split("a", "b")
    view = await scene.reloader.reload()
    await scene.lab.settle()
    assert (view.changed, view.unchanged) == (["big"], ["other"])
    assert set(scene.lab.roster.entries["big"].split.tasks) == {"a", "b"}


async def test_a_plan_that_changed_leaves_a_loaded_model_alone(edited, monkeypatch):
    """It serves on with the parts that it knows: refreshing it is another word."""
    scene = edited()
    scene.lab.entries["big"] = replace(scene.lab.entries["big"], split=_split("a"))
    child = await scene.lab.resident("big")
    monkeypatch.setattr(
        module, "resolve", lambda name, model, *_: replace(scene._entry(name, scene.fresh), split=_split("b"))
    )
    assert (await scene.reloader.reload()).changed == []
    await scene.lab.settle()
    assert scene.big.state is State.RESIDENT
    assert not child.ended


async def test_what_needs_a_restart_is_told_as_long_as_it_does(edited):
    """Against what the daemon runs with: again at the next reload, and no more once the edit was taken back."""
    scene = edited()
    began, edit = scene.fresh.server, scene.fresh.server.model_copy(update={"port": 4000})
    scene.fresh = scene.fresh.model_copy(update={"server": edit})
    assert (await scene.edit(queue=9)).needs_restart == ["server.port"]
    view = await scene.edit(queue=10)
    assert (view.needs_restart, view.settings) == (["server.port"], [])
    scene.fresh = scene.fresh.model_copy(update={"server": began})
    assert (await scene.edit(queue=11)).needs_restart == []
