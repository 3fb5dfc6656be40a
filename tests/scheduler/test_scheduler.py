"""The decision list, one rule at a time."""

import pytest

from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Kill, Load, Refuse, Stop

from .world import World, model


def last(world, kind):
    return [a for a in world.log if isinstance(a, kind)][-1]


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
    error = last(w, Refuse).error
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
    assert last(w, Stop).evicted_for == "b"
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
    error = last(w, Refuse).error
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
    error = last(w, Refuse).error
    assert (error.code, error.http_status) == ("queue_full", 429)
    assert (error.details["waiting"], error.details["limit"]) == (2, 2)


def test_a_queue_of_zero_still_serves_what_can_be_served():
    """`queue: 0` refuses waiting behind others, not the cold start itself."""
    w = World(10, [model("a", 4, queue_limit=0)])
    first = w.request("a")
    w.request("a")
    assert last(w, Refuse).error.code == "queue_full"
    w.run_effects()
    assert first in w.granted


def test_nobody_waits_for_ever():
    """After max_wait the request ends with the reason it waited for (rule 6)."""
    w = World(10, [model("a", 8), model("b", 8)], max_wait=60.0, patience=1e9)
    w.request("a")
    w.run_effects()
    w.request("b")
    w.tick(61.0)
    error = last(w, Refuse).error
    assert error.code == "wait_timeout"
    assert "a in use" in error.message


def test_constant_traffic_does_not_starve_another_model():
    """After the patience the busy model takes no new requests until the other had its turn (fleet 5)."""
    w = World(10, [model("a", 8, parallel=2), model("b", 8)], patience=30.0)
    busy = w.request("a")
    w.run_effects()
    patient = w.request("b")
    for _ in range(31):
        following = w.request("a")
        w.tick(1.0)
        w.finish(busy)
        busy = following
    assert busy in w.waiting, "the busy model must not have taken a new request"
    w.run_effects()
    assert patient in w.granted
    w.finish(patient)
    w.run_effects()
    assert busy in w.granted


def test_a_slow_model_does_not_stall_one_that_fits_beside_it():
    """A small cold model loads into free room although an earlier big one waits (row G6)."""
    w = World(10, [model("slow", 8), model("big", 8), model("small", 2)], patience=1e9)
    stream = w.request("slow")
    w.run_effects()
    big = w.request("big")
    small = w.request("small")
    w.run_effects()
    assert small in w.granted
    w.finish(stream)
    w.run_effects()
    assert big in w.granted


def test_a_newcomer_may_not_take_the_room_another_waits_for():
    """What would keep the first waiter out waits behind it."""
    w = World(10, [model("slow", 5), model("big", 9), model("other", 5)], patience=1e9)
    stream = w.request("slow")
    w.run_effects()
    big = w.request("big")
    w.request("other")
    assert w.loads == ["slow"]
    assert "big was asked for before" in w.state.models["other"].last_reason
    w.finish(stream)
    w.run_effects()
    assert big in w.granted


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


def test_a_broken_load_ends_its_requests_with_the_error_and_backs_off():
    """No crash loop: the pause doubles up to its cap; a manual load tries at once."""
    w = World(10, [model("a", 4)], backoff_first=1.0, backoff_max=3.0)
    for pause in (1.0, 2.0, 3.0, 3.0):
        request = w.request("a")
        w.breaks("a")
        assert w.ended[request] == "load_failed"
        at_once = w.request("a")
        assert w.ended[at_once] == "load_failed", "a client that tries again at once is told the pause, not kept waiting"
        w.freed("a")
        assert w.state.models["a"].state is State.FAILED
        refused = w.request("a")
        assert w.ended[refused] == "load_failed"
        w.tick(pause - 0.01)
        assert w.ended[w.request("a")] == "load_failed"
        w.tick(0.02)
    w.request("a")
    w.breaks("a")
    w.freed("a")
    w.send(ev.LoadWanted("a"))
    assert w.loading == ["a"]


def test_a_worker_that_dies_leaves_the_others_and_its_queue_alone():
    """Waiting requests are served by a new process after the pause."""
    w = World(10, [model("a", 4), model("b", 4)])
    w.request("a")
    w.request("b")
    w.run_effects()
    queued = w.request("a")
    w.dies("a")
    w.freed("a")
    assert w.resident() == {"b"}
    w.tick(1.1)
    w.run_effects()
    assert queued in w.granted


def test_high_priority_comes_back_after_a_crash():
    """It is wanted for ever."""
    w = World(10, [model("h", 4, priority="high")])
    w.send(ev.LoadWanted("h"))
    w.run_effects()
    w.dies("h")
    w.freed("h")
    w.tick(1.1)
    assert w.loading == ["h"]


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


def test_a_liar_makes_idle_models_leave_first():
    """More was taken than granted: an idle one goes, the ledger shows the overdraft meanwhile (fleet 1)."""
    w = World(6, [model("idle", 3), model("liar", 1)])
    first = w.request("idle")
    w.run_effects()
    w.finish(first)
    w.request("liar")
    w.ready("liar", used=4)
    assert w.stops == ["idle"]
    w.run_effects()
    assert w.resident() == {"liar"}
    assert w.state.ledgers["ram"].overdraft == 0


def test_a_liar_among_busy_models_hurts_only_itself():
    """With nothing idle the one over its allowance is ended; the others keep serving; the next load knows better."""
    w = World(6, [model("honest", 3), model("liar", 1)])
    honest = w.request("honest")
    w.run_effects()
    waiting = w.request("liar")
    w.ready("liar", used=4)
    assert last(w, Kill).model == "liar"
    w.send(ev.NeedLearned("liar", {"ram": 4}, "measured"))
    w.leave("liar")
    assert honest in w.granted
    assert waiting in w.waiting
    assert w.loads == ["honest", "liar"]
    w.finish(honest)
    w.run_effects()
    assert w.state.held("liar") == {"ram": 4}


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
    assert last(w, Refuse).error.details["available_bytes"] == 7


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


def test_two_models_that_exclude_each_other_swap_in_batches():
    """Twenty alternating clients: loads are bounded by the turns, and no load serves nobody (fleet 3)."""
    w = World(10, [model("a", 8, parallel=4), model("b", 8, parallel=4)], patience=30.0)
    clients = {w.request("ab"[i % 2]): "ab"[i % 2] for i in range(20)}
    served = 0
    for _ in range(2000):
        w.run_effects()
        w.tick(0.1)
        for request in list(w.granted):
            name = clients.pop(request)
            served += 1
            w.finish(request)
            if served < 400:
                clients[w.request(name)] = name
        if not clients:
            break
    assert not clients
    assert served >= 400
    assert len(w.loads) <= 8


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_reason_of_every_decision_names_its_numbers(name):
    """Loads and evictions say what was needed and what was free (rule 10)."""
    w = World(3 * 1024**3, [model("a", 2 * 1024**3), model("b", 2 * 1024**3)])
    request = w.request("a")
    w.run_effects()
    w.finish(request)
    w.request("b")
    assert "needs 2.0 GiB of ram" in last(w, Load).reason
    assert "idle for" in last(w, Stop).reason
    assert "needs 2.0 GiB of ram, 1.0 GiB of ram free" in last(w, Stop).reason
