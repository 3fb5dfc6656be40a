"""The dry run asks what the scheduler would ask (that it is what then happens: test_scheduler_properties)."""

from pagein.scheduler import events as ev
from pagein.scheduler.dry_run import foresee

from .world import World, model


def outcome(w, name):
    return foresee(w.state, w.state.models[name], w.now).outcome


def test_the_dry_run_changes_nothing():
    """Asking is no act: no event, no reason that people read, no victim."""
    w = World(10, [model("a", 8), model("b", 8)])
    w.finish(w.request("a"))
    w.run_effects()
    before = (len(w.log), w.state.models["b"].last_reason, dict(w.state.yielding), w.state.held("a"))
    seen = foresee(w.state, w.state.models["b"], w.now)
    assert (seen.outcome, [v.name for v in seen.victims]) == ("evict", ["a"])
    assert (len(w.log), w.state.models["b"].last_reason, dict(w.state.yielding), w.state.held("a")) == before


def test_one_that_backs_off_holds_nobody_up_in_the_dry_run_either():
    """It was asked for before, but it may not be tried yet: what fits now loads now."""
    w = World(10, [model("broken", 9), model("a", 4)], backoff_first=30.0)
    w.request("broken")
    w.ready("broken")
    waiting = w.request("broken")
    w.granted.clear()  # the client learns of the death a moment later
    w.dies("broken")
    w.freed("broken")
    w.tick(1.0)
    assert waiting in w.waiting
    assert outcome(w, "a") == "load"
    w.request("a")
    assert w.loading == ["a"]


def test_one_that_waits_for_room_is_served_first():
    """What would take its room waits behind it, in the dry run as in truth; the first one itself is not held up."""
    w = World(10, [model("slow", 5), model("big", 9), model("other", 5)], patience=1e9)
    w.request("slow")
    w.run_effects()
    w.request("big")
    w.tick()
    assert "big was asked for before" in foresee(w.state, w.state.models["other"], w.now).reason
    assert outcome(w, "big") == "wait"
    assert "before" not in foresee(w.state, w.state.models["big"], w.now).reason


def test_a_model_that_serves_at_its_limit_is_resident_with_the_reason_of_the_wait():
    """It is there, and a request would still wait."""
    w = World(10, [model("a", 4)])
    w.request("a")
    w.run_effects()
    seen = foresee(w.state, w.state.models["a"], w.now)
    assert (seen.outcome, seen.reason) == ("resident", "a is serving 1 request, 1 at a time")
    w.send(ev.UnloadWanted("a"))
    assert outcome(w, "a") == "wait"


def test_a_hung_worker_is_waited_for_in_the_dry_run_too():
    """It takes no more requests, although it has places and another one runs."""
    w = World(10, [model("a", 4, parallel=3)])
    first = w.request("a")
    w.run_effects()
    w.request("a")
    w.finish(first, silent=True)
    assert outcome(w, "a") == "wait"
    waiting = w.request("a")
    assert waiting in w.waiting
