"""Events that interleave in ways nobody plans: nothing is lost, nothing is refused wrongly, nothing stays for ever."""

from pagein.errors import LoadFailed
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load

from .world import World, model


def test_a_request_that_ends_after_its_removed_model_is_gone_gives_its_lease_back():
    """A worker can die under a request, and its model be struck off, before the client is told."""
    w = World(10, [model("a", 4)])
    request = w.request("a")
    w.run_effects()
    w.send(ev.Reconfigured(removed=frozenset({"a"})))
    w.freeing.append("a")
    w.send(ev.WorkerExited("a", LoadFailed("a died")))
    w.freeing.remove("a")
    w.granted.pop(request)
    w.send(ev.Freed("a"))
    assert "a" not in w.state.models
    w.send(ev.Finished(request, answered=False))
    assert len(w.state.leases) == 0
    assert not w.state.granted_at


def test_an_edit_that_brings_a_new_pool_takes_effect():
    """A card that is seen only at the reload is a pool from then on, and the rest of the edit counts too."""
    w = World(10, [model("a", 4)])
    w.send(ev.Reconfigured({"a": model("a", 6)}, budgets={"ram": 12, "cuda:0": 8}))
    assert w.state.models["a"].need == {"ram": 6}
    assert w.state.ledgers["cuda:0"].budget == 8


def test_an_edit_can_unpin_what_the_configuration_pinned():
    """Only an operator's pin outlives an edit: one that was configured goes with its line."""
    w = World(10, [model("a", 4, pinned=True), model("b", 4)])
    w.send(ev.PinChanged("b", True))
    w.send(ev.Reconfigured({"a": model("a", 5), "b": model("b", 5)}))
    assert not w.state.models["a"].pinned
    assert w.state.models["b"].pinned


def test_models_of_high_priority_that_are_edited_together_all_return():
    """They leave one at a time, so the wish to load the second comes while it is still there."""
    w = World(20, [model("a", 4, priority="high"), model("b", 4, priority="high")])
    for name in "ab":
        w.send(ev.LoadWanted(name, speculative=True))
    w.run_effects()
    w.send(ev.Reconfigured({n: model(n, 5, priority="high") for n in "ab"}))
    for name in "ab":
        w.send(ev.LoadWanted(name, speculative=True))
    w.run_effects()
    assert w.resident() == {"a", "b"}
    assert {w.state.models[n].allowance["ram"] for n in "ab"} == {5}


def test_a_model_that_an_edit_broke_is_not_loaded_for_an_earlier_wish():
    """Somebody wanted it loaded as it was; it cannot be served as it is."""
    w = World(10, [model("a", 4), model("b", 8)])
    request = w.request("b")
    w.run_effects()
    w.send(ev.LoadWanted("a"))
    w.send(ev.Reconfigured({"a": model("a", 4, problem="its file is gone")}))
    w.finish(request)
    w.run_effects()
    assert [a.model for a in w.log if isinstance(a, Load)] == ["b"]
    assert "its file is gone" in w.state.models["a"].error.message


def test_an_operators_wish_stays_one_that_somebody_waits_for():
    """A reload that would load the same model just in case does not make the operator wait for calm."""
    w = World(10, [model("a", 4), model("b", 8)])
    w.request("b")
    w.run_effects()
    w.send(ev.LoadWanted("a"))
    w.send(ev.LoadWanted("a", speculative=True))
    assert not w.state.models["a"].speculative


def test_one_idle_model_that_makes_up_for_other_programs_is_enough():
    """What the machine lacked before its memory came back is no reason to send the next one away."""
    w = World(20, [model("a", 8), model("b", 8)])
    for name in "ab":
        w.send(ev.LoadWanted(name))
        w.run_effects()
    short = ev.Measured({"a": {"ram": 2}, "b": {"ram": 2}}, {"ram": 10}, daemon=0)
    w.send(short)
    w.send(short)
    assert len(w.leaving) == 1
    w.run_effects()
    assert len(w.stops) == 1
    assert sum(m.state is State.RESIDENT for m in w.state.models.values()) == 1
