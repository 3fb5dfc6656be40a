"""What operators ask for: load, unload, pin, and what becomes of wishes that were taken back."""

from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Refuse, Stop, Wait

from .world import World, model


def test_unload_lets_requests_finish_and_takes_new_ones_after():
    """The operator's unload drains; what is asked for meanwhile is loaded again."""
    w = World(10, [model("a", 4)])
    stream = w.request("a")
    w.run_effects()
    w.send(ev.UnloadWanted("a"))
    assert w.stops == []
    assert w.state.models["a"].state is State.DRAINING
    late = w.request("a")
    w.finish(stream)
    assert w.stops == ["a"]
    w.run_effects()
    assert late in w.granted


def test_a_cancelled_waiter_vanishes_and_its_load_gives_way():
    """A load that nobody wants any more is ended when somebody needs the room."""
    w = World(10, [model("a", 8), model("b", 8)])
    gone = w.request("a")
    w.finish(gone)
    assert w.loading == ["a"]
    wanted = w.request("b")
    assert w.stops == ["a"]
    w.run_effects()
    assert wanted in w.granted


def test_a_load_calls_off_an_unload_that_drains():
    """The later wish wins: the worker serves on, and nobody waits behind a drain that never ends."""
    w = World(10, [model("a", 4)])
    stream = w.request("a")
    w.run_effects()
    w.send(ev.UnloadWanted("a"))
    waiting = w.request("a")
    assert "leaving" in w.last(Wait).reason
    w.send(ev.LoadWanted("a"))
    assert w.resident() == {"a"}
    w.finish(stream)
    assert waiting in w.granted
    assert (w.loads, w.stops) == (["a"], [])


def test_a_pin_calls_off_an_unload_that_drains():
    """What is pinned stays, also when it was to leave a moment ago."""
    w = World(10, [model("a", 4)])
    stream = w.request("a")
    w.run_effects()
    w.send(ev.UnloadWanted("a"))
    w.send(ev.PinChanged("a", True))
    w.finish(stream)
    assert w.stops == []
    assert w.resident() == {"a"}


def test_a_load_of_what_was_told_to_stop_brings_it_back():
    """A worker that got SIGTERM is not called back; a new one comes when its memory is free."""
    w = World(10, [model("a", 4)])
    w.finish(w.request("a"))
    w.run_effects()
    w.send(ev.UnloadWanted("a"))
    w.send(ev.LoadWanted("a"))
    assert w.state.models["a"].state is State.DRAINING
    w.run_effects()
    assert w.loads == ["a", "a"]
    assert w.resident() == {"a"}


def test_an_unload_that_waits_for_another_is_told_to_waiters():
    """One unload at a time: a model that must go but cannot yet serves nobody, and says that it is leaving."""
    w = World(10, [model("a", 4), model("b", 4)])
    for name in ("a", "b"):
        request = w.request(name)
        w.run_effects()
        w.finish(request)
    w.send(ev.UnloadWanted("a"))
    w.send(ev.UnloadWanted("b"))
    late = w.request("b")
    assert w.leaving == ["a"]
    assert w.last(Wait).reason == "b is leaving and will be loaded again"
    w.run_effects()
    assert late in w.granted


def test_a_load_that_its_operator_no_longer_waits_for_serves_who_else_waits():
    """An operator who hangs up does not take the load from under a client's request."""
    w = World(10, [model("a", 4)])
    w.send(ev.LoadWanted("a"))
    client = w.request("a")
    w.send(ev.LoadUnwanted("a"))
    assert w.stops == []
    w.ready("a")
    assert client in w.granted


def test_a_load_that_nobody_waits_for_gives_way():
    """It goes on while there is room, and is ended when somebody needs it."""
    w = World(10, [model("a", 8), model("b", 8)])
    w.send(ev.LoadWanted("a"))
    w.send(ev.LoadUnwanted("a"))
    assert w.loading == ["a"]
    w.request("b")
    assert w.stops == ["a"]


def test_a_wish_that_was_taken_back_before_there_was_room_is_forgotten():
    """Nothing is loaded for an operator who left."""
    w = World(10, [model("a", 8), model("b", 8)])
    stream = w.request("a")
    w.run_effects()
    w.send(ev.LoadWanted("b"))
    w.send(ev.LoadUnwanted("b"))
    w.finish(stream)
    w.run_effects()
    assert w.resident() == {"a"}


def test_high_priority_is_wanted_whoever_leaves():
    """An operator who stops waiting for it changes nothing."""
    w = World(10, [model("h", 4, priority="high")])
    w.send(ev.LoadWanted("h"))
    w.breaks("h")
    w.send(ev.LoadUnwanted("h"))
    w.freed("h")
    w.tick(1.1)
    assert w.loading == ["h"]


def test_the_reason_for_ending_an_unwanted_load_has_a_true_idle_time():
    """A model that was never used has been idle since its load began, not since the machine started."""
    w = World(10, [model("a", 8), model("b", 8)])
    w.now = 50_000.0
    w.finish(w.request("a"))
    w.tick(2.0)
    w.request("b")
    assert "idle for 2.0 s" in w.last(Stop).reason


def test_who_waited_for_a_place_at_a_busy_model_is_told_so_in_the_end():
    """The bound's refusal carries what the request waited for, not how the model was loaded long ago."""
    w = World(10, [model("a", 4)], max_wait=60.0)
    w.request("a")
    w.run_effects()
    w.request("a")
    w.tick(61.0)
    assert w.last(Refuse).error.message.endswith("a is serving 1 request, 1 at a time")


def test_keep_alive_of_nothing_lets_a_load_without_use_stay():
    """An operator loads for the request that comes next: it goes after that one, not before."""
    w = World(10, [model("a", 4, keep_alive=0.0)])
    w.send(ev.LoadWanted("a"))
    w.run_effects()
    w.tick(60.0)
    assert w.resident() == {"a"}
    w.finish(w.request("a"))
    assert w.stops == ["a"]
