"""Where memory runs out: liars, watchdog, pressure, other programs, what is left behind, hung workers."""

import pytest

from pagein.memory.pressure import PressureLevel, PressureState
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Kill, Note, Stop

from .world import World, model

MIB = 1024**2
CRITICAL = PressureState(PressureLevel.CRITICAL, ("1 % available",))
TIGHT = PressureState(PressureLevel.TIGHT, ("7 % available",))


def idle(w, *names):
    """Each was loaded and used, and is idle."""
    for name in names:
        request = w.request(name)
        w.run_effects()
        w.finish(request)


def measured(w, available=None, daemon=0, pressure=None, **used):
    w.send(ev.Measured({n: {"ram": c} for n, c in used.items()}, {"ram": available}, daemon, pressure))


# ── who outgrows its allowance ──────────────────────────────────────────────────────────────────


def test_a_load_that_outgrows_is_tried_again_with_more_and_nobody_sees_a_failure():
    """1 GiB declared, 4 needed: the requests wait on, each load reserves twice as much (fleet 1)."""
    w = World(6, [model("liar", 1), model("other", 3)])
    idle(w, "other")
    request = w.request("liar")
    w.outgrows("liar")
    w.freed("liar")
    assert w.state.models["liar"].allowance == {"ram": 2}
    w.outgrows("liar")
    w.run_effects()
    assert request in w.granted
    assert w.state.held("liar") == {"ram": 4}
    assert w.stops == ["other"]
    assert w.state.models["liar"].failures == 0


def test_a_measured_peak_beyond_twice_the_allowance_counts():
    """What it was measured to reach, and 20 %."""
    w = World(100, [model("liar", 10)])
    w.request("liar")
    w.outgrows("liar", peak=50)
    assert w.state.models["liar"].need == {"ram": 60}


def test_a_load_that_had_all_the_budget_and_outgrew_it_is_refused():
    """Then it is a failure like any other, with its back-off and the numbers in the answer."""
    w = World(6, [model("liar", 4)])
    request = w.request("liar")
    w.outgrows("liar")
    w.freed("liar")
    assert w.state.models["liar"].allowance == {"ram": 6}
    w.outgrows("liar")
    assert w.ended[request] == "out_of_memory"
    assert w.state.models["liar"].failures == 1


def test_a_guess_that_no_longer_fits_is_cut_to_what_does():
    """The daemon takes a little more than before: the model is not refused for ever for a number nobody knows."""
    w = World(10, [model("liar", 6)])
    w.request("liar")
    w.outgrows("liar")
    assert w.state.models["liar"].need == {"ram": 10}
    w.send(ev.Measured({}, {}, daemon=1))
    w.freed("liar")
    assert w.state.models["liar"].allowance == {"ram": 9}
    w.run_effects()
    assert w.resident() == {"liar"}


def test_a_worker_that_outgrows_in_use_fails_its_requests_and_reserves_more_next():
    """The in-flight ones are lost with it; that is a failure, and the next load knows better."""
    w = World(100, [model("liar", 10)])
    request = w.request("liar")
    w.run_effects()
    from pagein.errors import Outgrown

    w.finish(request, answered=False)
    w.freeing.append("liar")
    w.send(ev.WorkerExited("liar", Outgrown("liar", "ram", 10, 12, 12, "its cgroup")))
    assert w.state.models["liar"].need == {"ram": 20}
    assert w.state.models["liar"].failures == 1


def test_the_watchdog_ends_who_passes_allowance_and_margin_and_only_it():
    """Although the pool has room: what was not granted may be somebody else's in a moment."""
    w = World(2000 * MIB, [model("liar", 100 * MIB), model("honest", 100 * MIB)], watched=frozenset({"ram"}))
    used = w.request("honest")
    w.run_effects()
    idle(w, "liar")
    limit = w.state.limits.end_at(100 * MIB)
    measured(w, liar=limit, honest=limit)
    assert w.stops == []
    measured(w, liar=limit + 1)
    assert w.stops == ["liar"]
    assert f"it reached {164} MiB of ram, it was granted 100 MiB" in w.last(Kill).reason
    assert w.state.models["liar"].need["ram"] >= 196 * MIB
    assert used in w.granted


def test_the_watchdog_leaves_alone_what_has_a_cgroup():
    """There the kernel does it, to the byte."""
    w = World(2000 * MIB, [model("a", 100 * MIB)])
    idle(w, "a")
    measured(w, a=1000 * MIB)
    assert w.stops == []


@pytest.mark.parametrize(("margin", "more"), [(0.1, 100 * MIB), (0.01, 64 * MIB), (200 * MIB, 200 * MIB)])
def test_the_margin(margin, more):
    """A share or bytes, at least 64 MiB."""
    w = World(1, [], margin=margin)
    assert w.state.limits.end_at(1000 * MIB) == 1000 * MIB + more


# ── pressure ────────────────────────────────────────────────────────────────────────────────────


def test_critical_pressure_evicts_idle_models_one_by_one():
    """One at a time, with a pause for the signs to ease; never one in use or pinned (rows G5, G15)."""
    w = World(100, [model("a", 10), model("b", 10), model("busy", 10), model("pin", 10, pinned=True)])
    busy = w.request("busy")
    w.run_effects()
    idle(w, "a", "b", "pin")
    measured(w, pressure=CRITICAL)
    assert len(w.leaving) == 1
    assert "because memory is critical: 1 % available" in w.last(Stop).reason
    w.run_effects()
    measured(w, pressure=CRITICAL)
    assert len(w.stops) == 1, "the signs need time to ease"
    w.tick(3.0)
    measured(w, pressure=CRITICAL)
    w.run_effects()
    w.tick(3.0)
    measured(w, pressure=CRITICAL)
    assert set(w.stops) == {"a", "b"}
    assert busy in w.granted
    assert w.resident() == {"busy", "pin"}


def test_pressure_whose_signs_have_gone_evicts_nobody():
    """The level falls slowly; that it lingers is no reason to empty the machine."""
    w = World(100, [model("a", 10)])
    idle(w, "a")
    measured(w, pressure=PressureState(PressureLevel.CRITICAL))
    assert w.stops == []


def test_tight_pressure_lets_only_low_priority_go_and_begins_no_load_that_nobody_waits_for():
    """A request is served all the same."""
    models = [model("a", 10), model("low", 10, priority="low"), model("ahead", 10), model("asked", 10)]
    w = World(100, models, low_linger=100.0)
    idle(w, "a", "low")
    measured(w, pressure=TIGHT)
    assert w.leaving == ["low"]
    w.run_effects()
    w.send(ev.LoadWanted("ahead", speculative=True))
    request = w.request("asked")
    w.run_effects()
    assert request in w.granted
    assert "ahead" not in w.loads
    assert "nobody waits for it, and memory is tight" in w.state.models["ahead"].last_reason
    measured(w, pressure=PressureState(PressureLevel.CALM))
    assert "ahead" in w.loads


# ── other programs ──────────────────────────────────────────────────────────────────────────────


def test_what_other_programs_take_shrinks_the_budget_and_is_said():
    """Half the memory goes to another program: less can be loaded, and people are told once."""
    w = World(100, [model("a", 40), model("b", 40)])
    idle(w, "a")
    measured(w, available=200, a=40)
    measured(w, available=10, a=40)
    told = [n.reason for n in w.log if isinstance(n, Note) and n.model is None]
    assert told == ["ram: other programs leave 50 B of the budget of 100 B"]
    assert w.state.effective("ram") == 50
    measured(w, available=11, a=40)
    assert len([n for n in w.log if isinstance(n, Note) and n.model is None]) == 1
    request = w.request("b")
    assert request in w.waiting
    measured(w, available=200, a=40)
    assert [n.reason for n in w.log if isinstance(n, Note) and n.model is None][-1].endswith("can be used again")
    w.run_effects()
    assert request in w.granted


def test_what_was_promised_and_is_gone_makes_idle_models_leave():
    """A model was granted more than it takes yet, and another program took that: idle ones make room for it."""
    w = World(100, [model("grows", 60), model("idle", 30)])
    idle(w, "idle")
    growing = w.request("grows")
    w.loading.remove("grows")
    w.send(ev.BecameReady("grows", {"ram": 10}, 1.0))
    assert growing in w.granted
    measured(w, available=20, grows=10, idle=30)
    assert w.stops == [], "one reading can fall between two others"
    measured(w, available=20, grows=10, idle=30)
    assert w.stops == ["idle"]
    assert "other programs took 30 B of ram" in w.last(Stop).reason


# ── what is left behind ─────────────────────────────────────────────────────────────────────────


def test_what_does_not_come_back_stays_charged_until_it_does():
    """The model is absent and may be loaded again, but only beside what it left."""
    w = World(10, [model("a", 6), model("b", 6)])
    idle(w, "a")
    w.send(ev.UnloadWanted("a"))
    w.gone("a")
    w.freeing.remove("a")
    w.send(ev.Freed("a", {"ram": 5}))
    assert w.state.models["a"].state is State.ABSENT
    request = w.request("b")
    assert request in w.waiting
    assert "a left memory behind that is not free yet" in w.state.models["b"].last_reason
    w.send(ev.LeftChanged("a", {"ram": 3}))
    w.run_effects()
    assert request in w.granted
    w.send(ev.LeftChanged("a", {}))
    assert w.state.ledgers["ram"].held == 6


# ── hung ────────────────────────────────────────────────────────────────────────────────────────


def test_a_worker_that_is_silent_and_answers_nothing_else_is_ended():
    """The next waits for its back-off and gets a fresh worker; others are untouched (fleet 9)."""
    w = World(20, [model("a", 8), model("c", 8)])
    other = w.request("c")
    w.run_effects()
    silent = w.request("a")
    w.run_effects()
    waiting = w.request("a")
    w.tick(30.0)
    w.finish(silent, silent=True)
    assert w.stops == ["a"]
    assert "hangs" in w.last(Kill).reason
    w.run_effects()
    w.tick(2.0)
    w.run_effects()
    assert waiting in w.granted
    assert other in w.granted


def test_one_slow_request_among_answered_ones_is_no_hang():
    """It alone failed; the worker answers others."""
    w = World(20, [model("a", 8, parallel=2)])
    slow = w.request("a")
    w.run_effects()
    w.tick(1.0)
    w.finish(w.request("a"))
    w.tick(29.0)
    w.finish(slow, silent=True)
    assert w.stops == []


def test_a_hung_worker_takes_no_more_and_lets_those_it_has_finish():
    """A stream that still flows is in use, and in use is untouchable."""
    w = World(20, [model("a", 8, parallel=3)])
    silent, stream = w.request("a"), w.request("a")
    w.run_effects()
    w.tick(30.0)
    w.finish(silent, silent=True)
    late = w.request("a")
    assert late in w.waiting
    assert w.stops == []
    w.finish(stream)
    assert w.stops == ["a"]


def test_a_pinned_model_survives_the_recovery_from_a_liar():
    """What is kept is no way out of an overdraft, however long it is idle (fleet 12)."""
    w = World(10, [model("pin", 4, pinned=True), model("idle", 2), model("liar", 3)])
    idle(w, "pin", "idle")
    w.tick(1000.0)
    w.request("liar")
    w.ready("liar", used=9)
    w.run_effects()
    assert "pin" not in w.stops
    assert w.resident() >= {"pin"}
