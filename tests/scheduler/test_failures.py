"""Loads that break, workers that die, and models that take more than they said."""

import pytest

from pagein.residency.ledger import Ledger
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Kill, Stop

from .world import World, model


def test_a_broken_load_ends_its_requests_with_the_error_and_backs_off():
    """No crash loop: the pause doubles up to its cap; a manual load tries at once."""
    w = World(10, [model("a", 4)], backoff_first=1.0, backoff_max=3.0)
    for pause in (1.0, 2.0, 3.0, 3.0):
        request = w.request("a")
        w.breaks("a")
        assert w.ended[request] == "load_failed"
        at_once = w.request("a")
        assert w.ended[at_once] == "load_failed", (
            "a client that tries again at once is told the pause, not kept waiting"
        )
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
    assert w.last(Kill).model == "liar"
    w.send(ev.NeedLearned("liar", {"ram": 4}, "measured"))
    w.leave("liar")
    assert honest in w.granted
    assert waiting in w.waiting
    assert w.loads == ["honest", "liar"]
    w.finish(honest)
    w.run_effects()
    assert w.state.held("liar") == {"ram": 4}


@pytest.mark.parametrize("priority", ["high", "medium"])
def test_a_worker_that_dies_again_and_again_backs_off_further_each_time(priority):
    """Getting ready is no success: the pause doubles until a request was answered (row G11, fleet 18)."""
    w = World(10, [model("a", 4, priority=priority)], backoff_first=1.0, backoff_max=6.0)
    pauses = []
    for _ in range(5):
        w.send(ev.LoadWanted("a"))
        w.ready("a")
        w.dies("a")
        pauses.append(w.state.models["a"].retry_at - w.now)
        w.freed("a")
        assert w.loading == []
        w.tick(pauses[-1])
    assert pauses == [1.0, 2.0, 4.0, 6.0, 6.0]


def test_an_answer_ends_the_row_of_failures():
    """After an answered request the next death counts as the first; one that got no answer does not help."""
    w = World(10, [model("a", 4)], backoff_first=1.0)
    for answered, failures in ((True, 1), (False, 2), (False, 3), (True, 1)):
        request = w.request("a")
        w.ready("a")
        w.finish(request, answered)
        w.dies("a")
        w.freed("a")
        assert w.state.models["a"].failures == failures
        w.tick(60.0)


def test_a_long_life_ends_the_row_of_failures():
    """A worker that lived for as long as the longest pause was no crash loop."""
    w = World(10, [model("h", 4, priority="high")], backoff_first=1.0, backoff_max=60.0)
    w.send(ev.LoadWanted("h"))
    for lived, failures in ((0.0, 1), (1.0, 2), (60.0, 1)):
        w.ready("h")
        w.tick(lived)
        w.dies("h")
        w.freed("h")
        assert w.state.models["h"].failures == failures
        w.tick(60.0)


def test_an_operator_s_load_tries_at_once_also_while_the_memory_returns():
    """Asked for in the moment after the failure, it does not wait for the back-off."""
    w = World(10, [model("a", 4)], backoff_first=30.0)
    w.request("a")
    w.breaks("a")
    w.send(ev.LoadWanted("a"))
    w.freed("a")
    assert w.loading == ["a"]


def test_a_death_while_it_drains_for_an_operator_does_not_bring_it_back():
    """High priority is wanted for ever, but not against the operator who unloads it."""
    w = World(10, [model("h", 4, priority="high")])
    w.send(ev.LoadWanted("h"))
    w.run_effects()
    w.request("h")
    w.send(ev.UnloadWanted("h"))
    w.granted.clear()  # the client learns of the death a moment later
    w.dies("h")
    w.freed("h")
    w.tick(120.0)
    assert w.loading == []


def test_bytes_in_a_pool_that_was_not_expected_are_charged_and_given_back():
    """A model that uses a GPU that nobody granted it is seen in that pool's ledger."""
    w = World(10, [model("a", 4)])
    w.state.ledgers["cuda:0"] = gpu = Ledger("cuda:0", 8)
    w.request("a")
    w.run_effects()
    w.send(ev.Measured({"a": {"ram": 4, "cuda:0": 6}}))
    assert gpu.bytes_of("a") == 6
    w.send(ev.Measured({"a": {"ram": 4, "cuda:0": 9}}))
    assert w.last(Kill).model == "a"
    w.send(ev.Measured({"a": {"ram": 4, "cuda:0": 10}}))
    w.leave("a")
    assert gpu.held == w.state.ledgers["ram"].held - w.state.own_least == 0


def test_bytes_first_seen_in_a_pool_while_it_leaves_are_given_back_too():
    """What is measured after the order to stop is released with the rest."""
    w = World(10, [model("a", 4, priority="low")])
    w.state.ledgers["cuda:0"] = gpu = Ledger("cuda:0", 8)
    request = w.request("a")
    w.ready("a")
    w.finish(request)
    w.send(ev.Measured({"a": {"ram": 4, "cuda:0": 6}}))
    assert gpu.totals().releasing == 6
    w.leave("a")
    assert gpu.held == 0


def test_a_need_of_nothing_comes_and_goes_like_any_other():
    """An entry of 0 bytes is an entry: it is confirmed and released."""
    w = World(10, [model("a", 0)])
    for _ in range(2):
        request = w.request("a")
        w.run_effects()
        w.finish(request)
        w.send(ev.UnloadWanted("a"))
        w.run_effects()
        assert w.state.models["a"].state is State.ABSENT


def test_a_burst_of_the_daemon_s_own_memory_passes():
    """Large uploads raise what the daemon takes for a moment; nobody is refused for ever because of it."""
    w = World(10, [model("a", 8)])
    w.send(ev.Measured({}, {}, daemon=2))
    w.send(ev.Measured({}, {}, daemon=5))
    waiting = w.request("a")
    assert waiting in w.waiting
    assert "the daemon itself takes 5 B" in w.state.models["a"].last_reason
    w.send(ev.Measured({}, {}, daemon=1))
    assert w.state.ledgers["ram"].held == 2 + 8, "what it was granted at start stays charged"
    w.run_effects()
    assert waiting in w.granted


def test_a_daemon_that_grows_makes_idle_models_leave_and_kills_nobody():
    """An overdraft that no model made costs idle models only."""
    w = World(10, [model("idle", 4), model("busy", 5)])
    for name in ("idle", "busy"):
        request = w.request(name)
        w.run_effects()
    w.send(ev.Measured({}, {}, daemon=3))
    assert w.stops == []
    w.finish(1)
    assert w.last(Stop).model == "idle"
    assert "because ram was measured 2 B over its budget" in w.last(Stop).reason
    assert request in w.granted


def test_idle_models_do_not_leave_in_vain_for_a_liar():
    """Where all that is idle is not enough, the liar goes and only the liar, and nobody is granted a lease on it."""
    w = World(10, [model("idle", 2), model("busy", 5), model("liar", 1)])
    idle = w.request("idle")
    w.run_effects()
    w.finish(idle)
    w.request("busy")
    w.run_effects()
    waiting = w.request("liar")
    w.ready("liar", used=6)
    assert w.stops == ["liar"]
    assert waiting in w.waiting


def test_the_reason_of_a_kill_can_be_read():
    """It says how much, of what, beyond what, and why now."""
    w = World(6, [model("honest", 3), model("liar", 1)])
    w.request("honest")
    w.run_effects()
    w.request("liar")
    w.ready("liar", used=4)
    assert w.last(Kill).reason == (
        "ended: model 'liar' ran out of its memory: it reached 4 B of ram, it was granted 1 B (limit 1 B), "
        "and was ended by Pagein: ram was measured 1 B over its budget, and too little is idle"
    )
