"""The decision list, one rule at a time."""

import pytest

from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load, Refuse, Stop

from .world import World, model


def test_a_cold_model_is_loaded_once_however_many_ask():
    """Ten requests for one cold model start one process, and all are served by it."""
    w = World(10, [model("d", 4, parallel=10)])
    requests = [w.request("d") for _ in range(10)]
    assert w.loads == ["d"]
    w.ready("d")
    assert set(w.granted) == set(requests)


def test_what_can_never_fit_is_refused_at_once_and_nothing_leaves():
    """Refuse before evicting, with both numbers (rule 4)."""
    w = World(10, [model("small", 8), model("huge", 11)])
    small = w.request("small")
    w.run_effects()
    w.finish(small)
    w.request("huge")
    error = w.last(Refuse).error
    assert error.code == "model_too_large"
    assert (error.details["need_bytes"], error.details["available_bytes"]) == (11, 10)
    assert w.resident() == {"small"}
    assert w.stops == []


def test_an_idle_model_is_evicted_by_size_not_by_count():
    """Eight of ten are taken: asking for four evicts, then two models of three stay side by side (fleet 2)."""
    w = World(10, [model("a", 8), model("b", 4), model("c", 3)])
    first = w.request("a")
    w.run_effects()
    w.finish(first)
    second = w.request("b")
    assert w.stops == ["a"]
    assert w.last(Stop).evicted_for == "b"
    w.run_effects()
    w.finish(second)
    third = w.request("c")
    w.run_effects()
    w.finish(third)
    assert w.resident() == {"b", "c"}


def test_releasing_bytes_count_until_measured_free():
    """The load starts when the memory is measured to be back, not when the process is gone."""
    w = World(10, [model("a", 8), model("b", 4)])
    first = w.request("a")
    w.run_effects()
    w.finish(first)
    w.request("b")
    w.gone("a")
    assert w.loads == ["a"]
    w.freed("a")
    assert w.loads == ["a", "b"]


def test_a_model_in_use_is_not_evicted():
    """The newcomer waits until the stream ends, and is told why (fleet 8)."""
    w = World(10, [model("a", 8), model("b", 4)])
    stream = w.request("a")
    w.run_effects()
    waiting = w.request("b")
    w.tick()
    assert w.stops == []
    assert "a in use" in w.state.models["b"].last_reason
    w.finish(stream)
    w.run_effects()
    assert waiting in w.granted


def test_a_model_serves_the_request_that_loaded_it_before_it_can_leave():
    """Between ready and first use nothing evicts (fleet 7)."""
    w = World(10, [model("a", 8), model("b", 8)])
    first = w.request("a")
    w.request("b")
    w.ready("a")
    assert first in w.granted
    assert w.stops == []
    w.finish(first)
    assert w.stops == ["a"]


def test_two_cold_models_with_room_for_one_are_both_served():
    """Asked for in the same moment: one after the other, never both at once (fleet 6)."""
    w = World(10, [model("a", 6), model("b", 6), model("c", 6)])
    idle = w.request("a")
    w.run_effects()
    w.finish(idle)
    b, c = w.request("b"), w.request("c")
    w.run_effects()
    assert b in w.granted
    assert c not in w.granted
    w.finish(b)
    w.run_effects()
    assert c in w.granted


def test_one_unload_at_a_time_per_pool():
    """Two victims leave one after the other (row G15)."""
    w = World(10, [model("a", 5), model("b", 5), model("big", 10)])
    for name in ("a", "b"):
        request = w.request(name)
        w.run_effects()
        w.finish(request)
    w.request("big")
    assert len(w.leaving) == 1
    w.leave(w.leaving[0])
    assert len(w.leaving) == 1
    w.leave(w.leaving[0])
    assert w.loading == ["big"]


def test_high_and_pinned_models_never_leave():
    """What only fits without them is refused, and the refusal names them (fleet 12)."""
    w = World(10, [model("p", 4, pinned=True), model("h", 2, priority="high"), model("x", 5)])
    w.send(ev.LoadWanted("h"))
    w.send(ev.LoadWanted("p"))
    w.run_effects()
    w.request("x")
    error = w.last(Refuse).error
    assert error.code == "model_too_large"
    assert error.details["held_by"] == ["p", "h"]
    assert w.resident() == {"p", "h"}


def test_low_priority_is_used_and_left():
    """It goes with its last lease, or after the linger."""
    w = World(10, [model("l", 4, priority="low")])
    request = w.request("l")
    w.run_effects()
    w.finish(request)
    assert w.stops == ["l"]

    lingering = World(10, [model("l", 4, priority="low")], low_linger=5.0)
    request = lingering.request("l")
    lingering.run_effects()
    lingering.finish(request)
    lingering.tick(4.9)
    assert lingering.stops == []
    lingering.tick(0.2)
    assert lingering.stops == ["l"]


def test_low_leaves_before_medium():
    """Lower priority is evicted first, however dear it is to bring back."""
    w = World(10, [model("m", 4), model("l", 4, priority="low"), model("x", 4)], low_linger=1e9)
    for name, seconds in (("m", 0.1), ("l", 100.0)):
        request = w.request(name)
        w.ready(name, seconds=seconds)
        w.finish(request)
    w.request("x")
    assert w.stops == ["l"]


def test_keep_alive_counts_from_the_last_use_and_spares_what_is_in_use():
    """Two seconds of keep-alive do not end a six-second answer, nor a long load (fleet 11)."""
    w = World(10, [model("a", 4, keep_alive=2.0)])
    request = w.request("a")
    w.tick(9.0)
    w.ready("a")
    w.tick(6.0)
    assert w.stops == []
    w.finish(request)
    w.tick(1.9)
    assert w.stops == []
    w.tick(0.2)
    assert w.stops == ["a"]


def test_the_queue_is_bounded():
    """One more than `queue` waiting is refused at once with 429 (row G6)."""
    w = World(10, [model("a", 4, queue_limit=2)])
    w.request("a")
    w.run_effects()
    for _ in range(3):
        w.request("a")
    error = w.last(Refuse).error
    assert (error.code, error.http_status) == ("queue_full", 429)
    assert (error.details["waiting"], error.details["limit"]) == (2, 2)


def test_a_queue_of_zero_still_serves_what_can_be_served():
    """`queue: 0` refuses waiting behind others, not the cold start itself."""
    w = World(10, [model("a", 4, queue_limit=0)])
    first = w.request("a")
    w.request("a")
    assert w.last(Refuse).error.code == "queue_full"
    w.run_effects()
    assert first in w.granted


def test_nobody_waits_for_ever():
    """After max_wait the request ends with the reason it waited for (rule 6)."""
    w = World(10, [model("a", 8), model("b", 8)], max_wait=60.0, patience=1e9)
    w.request("a")
    w.run_effects()
    w.request("b")
    w.tick(61.0)
    error = w.last(Refuse).error
    assert error.code == "wait_timeout"
    assert "a in use" in error.message


def test_the_machine_may_have_less_than_the_ledger():
    """Memory that other programs took counts as not free; the request waits and says so (rule 2)."""
    w = World(10, [model("a", 4)])
    w.send(ev.Measured({}, {"ram": 3}))
    waiting = w.request("a")
    assert w.loads == []
    assert "other programs" in w.state.models["a"].last_reason
    w.send(ev.Measured({}, {"ram": 5}))
    w.run_effects()
    assert waiting in w.granted


def test_granted_bytes_that_are_not_used_yet_are_not_free_on_the_machine():
    """A load in progress has a claim on what the machine still reports as available."""
    w = World(100, [model("a", 4), model("b", 4)])
    w.send(ev.Measured({}, {"ram": 6}))
    w.request("a")
    w.request("b")
    assert w.loads == ["a"]
    w.send(ev.Measured({"a": {"ram": 4}}, {"ram": 4}))
    assert w.loads == ["a", "b"]


def test_the_daemon_s_own_bytes_are_in_the_budget():
    """What the daemon takes is not granted to models."""
    w = World(10, [model("a", 8)])
    w.send(ev.Measured({}, {}, daemon=3))
    w.request("a")
    assert w.last(Refuse).error.details["available_bytes"] == 7


def test_shutdown_refuses_what_waits_and_loads_nothing():
    """Every request ends."""
    w = World(10, [model("a", 8), model("b", 8)])
    w.request("a")
    w.run_effects()
    waiting = w.request("b")
    w.send(ev.ShutdownWanted())
    assert w.ended[waiting] == "shutting_down"
    assert w.ended[w.request("b")] == "shutting_down"
    assert w.loads == ["a"]


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_reason_of_every_decision_names_its_numbers(name):
    """Loads and evictions say what was needed and what was free (rule 10)."""
    w = World(3 * 1024**3, [model("a", 2 * 1024**3), model("b", 2 * 1024**3)])
    request = w.request("a")
    w.run_effects()
    w.finish(request)
    w.request("b")
    assert "needs 2.0 GiB of ram" in w.last(Load).reason
    assert "idle for" in w.last(Stop).reason
    assert "needs 2.0 GiB of ram, 1.0 GiB of ram free" in w.last(Stop).reason
