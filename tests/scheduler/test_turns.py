"""Turns: minimum residency, holds for agent loops, the compute lock."""

import math

import pytest

from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev

from .world import World, model


def serve(w, name):
    """One request from its arrival to its answer."""
    request = w.request(name)
    w.run_effects()
    assert request in w.granted
    w.finish(request)


def test_a_model_that_was_just_loaded_is_not_thrown_out_at_once():
    """Another waits for its minimum residency, is told so, and is decided on then without an event (fleet 3)."""
    w = World(10, [model("a", 8), model("b", 8)], min_residency=2.0)
    serve(w, "a")
    waiting = w.request("b")
    assert w.stops == []
    assert "a is kept for its clients for 2.0 s" in w.state.models["b"].last_reason
    assert w.state.wake_at == w.now + 2.0
    w.tick(2.0)
    w.run_effects()
    assert waiting in w.granted


def test_a_stay_in_vain_is_shorter_each_time_and_one_client_that_alternates_hardly_waits():
    """A single client that asks a, b, a, b … gains nothing from a stay, so it soon pays nothing for it."""
    w = World(10, [model("a", 8), model("b", 8)], min_residency=2.0)
    waits = []
    for turn in range(24):
        since, request = w.now, w.request("ab"[turn % 2])
        while request not in w.granted:
            w.run_effects()
            if request not in w.granted:
                w.tick(max(0.001, w.state.wake_at - w.now))
        waits.append(w.now - since)
        w.finish(request)
    assert waits[1] == pytest.approx(2.0, abs=0.01)
    assert max(waits[-4:]) == pytest.approx(0.0, abs=0.01)


def test_a_model_that_is_wanted_back_before_its_room_was_of_use_stays_its_full_time_again():
    """Two clients that throw each other's models out in turn are what the stay is for."""
    w = World(10, [model("a", 8), model("b", 8)], min_residency=2.0)
    w.state.models["a"].stay = 0.0
    serve(w, "a")
    w.request("b")
    assert w.leaving == ["a"]
    w.request("a")
    assert w.state.models["a"].stay is None


def test_an_agent_loop_keeps_its_model_over_its_pauses():
    """After a pause was seen, an idle model is held for twice that, at most the hold (fleet 4)."""
    w = World(10, [model("a", 8), model("b", 8)], hold=10.0, patience=30.0)
    serve(w, "a")
    w.tick(2.0)
    serve(w, "a")
    other = w.request("b")
    w.tick(2.0)
    assert w.stops == [], "the loop's next request is expected"
    serve(w, "a")
    w.tick(4.1)
    w.run_effects()
    assert other in w.granted, "the loop went silent"


def test_a_hold_ends_with_the_patience_of_the_other_loop():
    """Two loops with 2 s pauses and 5 s loads: few swaps, and neither waits longer than its patience and a load."""
    w = World(10, [model("a", 8), model("b", 8)], hold=10.0, patience=30.0, min_residency=2.0, max_wait=1e9)
    begins = {"a": 0.0, "b": 0.5}
    asked: dict[str, tuple[int, float]] = {}
    ready_at: dict[str, float] = {}
    began, waits = w.now, []
    while w.now - began < 600:
        for name, at in begins.items():
            if name not in asked and w.now - began >= at:
                asked[name] = (w.request(name), w.now)
        for name in list(w.leaving):
            w.leave(name)
        for name in list(w.loading):
            if w.now >= ready_at.setdefault(name, w.now + 5.0):
                del ready_at[name]
                w.ready(name, seconds=5.0)
        for name, (request, since) in list(asked.items()):
            if request in w.granted:
                waits.append(w.now - since)
                w.finish(request)
                del asked[name]
                begins[name] = w.now - began + 2.0
        w.tick(0.25)
    assert len(w.loads) <= 600 / 30 + 2, "about one swap per patience"
    assert max(waits) <= 30 + 2 * 5 + 1


def test_pauses_longer_than_the_hold_are_no_loop():
    """A model that is asked now and then is not held for long against others."""
    w = World(10, [model("a", 8), model("b", 8)], hold=10.0)
    serve(w, "a")
    w.tick(60.0)
    serve(w, "a")
    other = w.request("b")
    w.run_effects()
    assert other in w.granted


def test_an_operator_does_not_wait_for_a_stay():
    """What is kept for clients still leaves when it is told to."""
    w = World(10, [model("a", 8)], min_residency=100.0)
    serve(w, "a")
    w.send(ev.UnloadWanted("a"))
    assert w.leaving == ["a"]


# ── compute lock ────────────────────────────────────────────────────────────────────────────────


def heavy(name, need, **more):
    return model(name, need, heavy=True, **more)


def test_heavy_models_compute_one_at_a_time_and_light_ones_are_not_held_up():
    """Both are resident; the second waits, is told for whom, and has its turn next (row G7)."""
    w = World(30, [heavy("a", 8), heavy("b", 8), model("light", 2)])
    first = w.request("a")
    w.run_effects()
    second = w.request("b")
    w.run_effects()
    assert w.resident() == {"a", "b"}
    assert second in w.waiting
    w.tick()
    assert w.log[-1].reason == "a computes first: heavy models of cpu take turns"
    light = w.request("light")
    w.run_effects()
    assert light in w.granted
    w.finish(first)
    assert second in w.granted


def test_turns_go_by_who_asked_first():
    """A stream of requests for a, several at a time, does not keep b from computing."""
    w = World(30, [heavy("a", 8, parallel=4), heavy("b", 8)])
    a1 = w.request("a")
    w.run_effects()
    w.send(ev.LoadWanted("b"))
    w.run_effects()
    w.tick()
    b1 = w.request("b")
    w.tick()
    a2 = w.request("a")
    assert a2 in w.waiting, "b asked before"
    w.finish(a1)
    assert b1 in w.granted
    assert a2 in w.waiting
    w.finish(b1)
    assert a2 in w.granted


def test_a_young_turn_fills_its_slots():
    """What comes within its first second computes along: a batch costs little more than one, and others wait no longer
    than that second more."""
    w = World(30, [heavy("a", 8, parallel=3), heavy("b", 8)])
    w.send(ev.LoadWanted("b"))
    w.run_effects()
    first = w.request("a")
    w.run_effects()
    b = w.request("b")
    w.tick(0.5)
    along = w.request("a")
    w.tick(0.6)
    late = w.request("a")
    assert {first, along} <= set(w.granted)
    assert {b, late} <= set(w.waiting)


def test_requests_of_one_heavy_model_compute_together():
    """The lock is between models: what a worker batches it may batch."""
    w = World(30, [heavy("a", 8, parallel=2)])
    first, second = w.request("a"), w.request("a")
    w.run_effects()
    assert {first, second} <= set(w.granted)


@pytest.mark.parametrize("lock", [False, {"cpu": False}])
def test_the_lock_can_be_off(lock):
    """For all devices or for one."""
    w = World(30, [heavy("a", 8), heavy("b", 8)], compute_lock=lock)
    first, second = w.request("a"), w.request("b")
    w.run_effects()
    assert {first, second} <= set(w.granted)


def test_each_device_has_its_own_lock():
    """A heavy model on a GPU does not wait for one on the CPU."""
    w = World(30, [heavy("a", 8), heavy("b", 8, device="cuda:0")])
    first, second = w.request("a"), w.request("b")
    w.run_effects()
    assert {first, second} <= set(w.granted)


def test_a_heavy_model_that_yields_its_turn_holds_nobody_up():
    """It waits for a model that needs its memory; that it asked first must not stop the others from computing."""
    w = World(20, [heavy("a", 8), heavy("b", 8), model("big", 12)], patience=5.0)
    a = w.request("a")
    w.run_effects()
    b = w.request("b")
    w.run_effects()
    big = w.request("big")
    w.tick(6.0)
    w.finish(a)
    w.run_effects()
    for request in (b, big):
        assert request in w.granted or request in w.waiting
    for _ in range(20):
        for request in list(w.granted):
            w.finish(request)
        w.run_effects()
        w.tick(1.0)
    assert not w.waiting


# ── keep_alive ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("configured", "wished", "leaves_after"),
    [
        (None, None, None),
        (None, 0.0, 0.0),
        (None, 300.0, 300.0),
        (60.0, None, 60.0),
        (60.0, 0.0, 0.0),
        (60.0, math.inf, None),
        (math.inf, None, None),
        (math.inf, 5.0, 5.0),
    ],
)
def test_keep_alive_of_configuration_and_request(configured, wished, leaves_after):
    """A request's wish counts in place of the configured one; -1 is for ever, 0 at once (fleet 13)."""
    w = World(10, [model("a", 4, keep_alive=configured)])
    request = w.request("a", wished)
    w.run_effects()
    w.finish(request)
    if leaves_after:
        assert w.leaving == []
        w.tick(leaves_after - 0.1)
        assert w.leaving == []
        w.tick(0.2)
    elif leaves_after is None:
        w.tick(1e6)
    assert w.leaving == ([] if leaves_after is None else ["a"])


def test_a_load_call_without_a_pin_does_not_make_a_model_immortal():
    """It is loaded, and evicted for another like any model (fleet 13)."""
    w = World(10, [model("a", 8), model("b", 8)])
    w.send(ev.LoadWanted("a"))
    w.run_effects()
    request = w.request("b")
    w.run_effects()
    assert request in w.granted
    assert w.state.models["a"].state is State.ABSENT


def test_the_wish_of_a_request_ends_with_its_worker():
    """The next load begins as configured."""
    w = World(10, [model("a", 4, keep_alive=5.0)])
    request = w.request("a", math.inf)
    w.run_effects()
    w.finish(request)
    w.send(ev.UnloadWanted("a"))
    w.run_effects()
    serve(w, "a")
    w.tick(6.0)
    assert w.leaving == ["a"]
