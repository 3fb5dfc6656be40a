"""An edited configuration: what is untouched runs on, what changed drains and returns."""

from pagein.residency.lifecycle import State
from pagein.scheduler import Limits
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Renewed

from .world import World, model


def test_a_changed_model_drains_and_returns_with_its_new_settings():
    """Its stream finishes with the old ones; who waits is served by the new."""
    w = World(20, [model("a", 4), model("same", 4)])
    stream, other = w.request("a"), w.request("same")
    w.run_effects()
    waiting = w.request("a")
    w.send(ev.Reconfigured({"a": model("a", 6, parallel=2)}))
    assert stream in w.granted
    assert w.state.models["a"].state is State.DRAINING
    w.finish(stream)
    w.run_effects()
    assert waiting in w.granted
    assert w.state.held("a") == {"ram": 6}
    assert w.state.models["a"].parallel == 2
    assert other in w.granted
    assert w.stops == ["a"]


def test_an_absent_model_changes_at_once():
    """Nothing has to drain."""
    w = World(20, [model("a", 4)])
    w.send(ev.Reconfigured({"a": model("a", 6)}))
    assert w.last(Renewed).model == "a"
    assert w.state.models["a"].need == {"ram": 6}


def test_a_new_model_can_be_asked_for():
    """At once, in the same moment."""
    w = World(20, [])
    w.send(ev.Reconfigured({"new": model("new", 6)}))
    request = w.request("new")
    w.run_effects()
    assert request in w.granted


def test_a_removed_model_finishes_what_it_serves_and_refuses_what_waits():
    """Then nothing of it is left, and its name is unknown."""
    w = World(20, [model("a", 4)])
    stream = w.request("a")
    w.run_effects()
    waiting = w.request("a")
    w.send(ev.Reconfigured(removed=frozenset({"a"})))
    assert w.ended[waiting] == "model_not_found"
    w.finish(stream)
    w.run_effects()
    assert w.state.models == {}
    assert w.last(Renewed).removed
    late = w.request("a")
    assert w.ended[late] == "model_not_found"


def test_a_model_that_was_removed_and_is_put_back_before_it_left_returns():
    """The newest file counts."""
    w = World(20, [model("a", 4)])
    stream = w.request("a")
    w.run_effects()
    w.send(ev.Reconfigured(removed=frozenset({"a"})))
    w.send(ev.Reconfigured({"a": model("a", 5)}))
    w.finish(stream)
    w.run_effects()
    request = w.request("a")
    w.run_effects()
    assert request in w.granted
    assert w.state.held("a") == {"ram": 5}


def test_a_smaller_budget_evicts_idle_models_and_waits_for_busy_ones():
    """Nothing in use is taken away for it."""
    w = World(20, [model("busy", 8), model("idle", 8)])
    busy = w.request("busy")
    w.run_effects()
    request = w.request("idle")
    w.run_effects()
    w.finish(request)
    w.send(ev.Reconfigured(budgets={"ram": 6}))
    w.run_effects()
    assert w.stops == ["idle"]
    assert busy in w.granted
    w.finish(busy)
    assert w.stops == ["idle", "busy"]


def test_new_limits_count_from_now_on():
    """For those who wait already as well."""
    w = World(8, [model("a", 8), model("b", 8)], patience=100.0)
    busy = w.request("a")
    w.run_effects()
    waiting = w.request("b")
    w.tick(20.0)
    w.send(ev.Reconfigured(limits=Limits(max_wait=10.0)))
    assert w.ended[waiting] == "wait_timeout"
    assert busy in w.granted
