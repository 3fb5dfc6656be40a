"""Sleep as a middle state: what it keeps is charged, and one that frees nothing is caught (fleet 15)."""

from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Sleep, Stop, Wake

from .world import World, model


def two(budget=10, **limits):
    """a sleeps, and was used; b wants its room."""
    w = World(budget, [model("a", 8), model("b", 6)], **limits)
    w.sleepers.add("a")
    request = w.request("a")
    w.run_effects()
    w.finish(request)
    return w, w.request("b")


def test_a_model_that_can_sleep_sleeps_instead_of_leaving():
    """Its process stays; what it keeps is held in the ledger."""
    w, request = two()
    assert w.last(Sleep).model == "a"
    w.sleeps("a", 2)
    assert w.state.held("a") == {"ram": 2}
    assert w.state.models["a"].state is State.ASLEEP
    w.run_effects()
    assert request in w.granted
    assert w.stops == []


def test_a_sleeper_wakes_with_its_whole_need():
    """What it lacks must be free; no new process is started."""
    w, request = two()
    w.sleeps("a", 2)
    w.run_effects()
    w.finish(request)
    again = w.request("a")
    w.run_effects()
    assert again in w.granted
    assert w.last(Wake).allowance == {"ram": 8}
    assert w.loads == ["a", "b"]
    assert w.state.held("a") == {"ram": 8}


def test_a_sleep_that_frees_nothing_is_caught_and_ended():
    """It keeps 90 %: it leaves for good, and is not told to sleep again."""
    w, request = two()
    w.sleeps("a", 7)
    assert "its sleep kept 7 B of 8 B of ram" in w.last(Stop).reason
    assert w.leaving == ["a"]
    w.run_effects()
    assert request in w.granted
    assert not w.state.models["a"].sleeps


def test_a_sleep_that_fails_ends_in_an_unload():
    """The room is needed in any case."""
    w, request = two()
    w.send(ev.SleepBroke("a", "it answered 500 to /sleep"))
    assert "it answered 500" in w.last(Stop).reason
    w.run_effects()
    assert request in w.granted


def test_a_sleeper_that_is_in_the_way_leaves():
    """Where its rest is needed too."""
    w, _ = two(budget=8)
    w.sleeps("a", 4)
    assert w.leaving == ["a"]
    w.run_effects()
    assert w.granted


def test_a_sleeper_that_dies_is_loaded_anew():
    """Its bytes come back, and the next request starts a process."""
    w, request = two()
    w.sleeps("a", 2)
    w.run_effects()
    w.dies("a")
    w.freed("a")
    w.finish(request)
    w.tick(5.0)
    again = w.request("a")
    w.run_effects()
    assert again in w.granted
    assert w.loads == ["a", "b", "a"]


def test_an_operators_unload_is_no_sleep():
    """It was asked to go."""
    w = World(10, [model("a", 8)])
    w.sleepers.add("a")
    request = w.request("a")
    w.run_effects()
    w.finish(request)
    w.send(ev.UnloadWanted("a"))
    assert w.leaving == ["a"]


def test_a_sleeper_can_be_unloaded():
    """Asleep it has a process like any other."""
    w, request = two()
    w.sleeps("a", 2)
    w.run_effects()
    w.finish(request)
    w.send(ev.UnloadWanted("a"))
    w.run_effects()
    assert w.state.held("a") == {}
