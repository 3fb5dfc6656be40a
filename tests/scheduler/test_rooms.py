"""Memory for outsiders: asked for, given without touching what is in use, taken back."""

from pagein.scheduler import events as ev
from pagein.scheduler.actions import Deny, Give

from .world import World, model


def idle(w, name):
    request = w.request(name)
    w.run_effects()
    w.finish(request)


def test_an_outsider_gets_what_is_free_at_once():
    """The bytes are held in the ledger until it ends."""
    w = World(10, [model("a", 6)])
    w.want_room("lease-1", 4)
    assert w.last(Give).room == "lease-1"
    assert w.state.ledgers["ram"].free == 6
    w.end_room("lease-1")
    assert w.state.ledgers["ram"].free == 10


def test_idle_models_leave_for_an_outsider_and_busy_ones_do_not():
    """It waits for what is in use, and is given it in its turn."""
    w = World(10, [model("idle", 4), model("busy", 4)])
    busy = w.request("busy")
    w.run_effects()
    idle(w, "idle")
    w.want_room("lease-1", 8)
    w.run_effects()
    assert w.rooms["lease-1"] == "wanted"
    assert "busy in use" in w.state.rooms["lease-1"].last_reason
    w.finish(busy)
    w.run_effects()
    assert w.rooms["lease-1"] == "held"
    assert w.resident() == set()


def test_what_can_never_be_given_is_denied_and_nothing_is_evicted():
    """With both numbers, and with who keeps the rest."""
    w = World(10, [model("pin", 3, pinned=True), model("idle", 3)])
    idle(w, "pin")
    idle(w, "idle")
    w.want_room("lease-1", 8)
    assert "8 B of ram cannot be given: the budget can give at most 7 B, with pin kept" in w.last(Deny).reason
    assert w.stops == []


def test_a_model_waits_for_an_outsider_and_is_told_so():
    """A lease is never taken back; who holds it is named."""
    w = World(10, [model("a", 6)], patience=1.0)
    w.want_room("lease-1", 6)
    request = w.request("a")
    w.tick(5.0)
    assert request in w.waiting
    assert "lease-1 in use" in w.state.models["a"].last_reason
    w.end_room("lease-1")
    w.run_effects()
    assert request in w.granted


def test_who_asked_first_is_served_first():
    """An outsider does not overtake a request that waits for the same room."""
    w = World(10, [model("busy", 8), model("b", 8)])
    busy = w.request("busy")
    w.run_effects()
    request = w.request("b")
    w.want_room("lease-1", 8)
    w.finish(busy)
    w.run_effects()
    assert request in w.granted
    assert w.rooms["lease-1"] == "wanted"


def test_a_wish_that_is_taken_back_holds_nobody_up():
    """Cancelled waiters vanish at once."""
    w = World(10, [model("busy", 8), model("b", 8)])
    busy = w.request("busy")
    w.run_effects()
    w.tick()
    w.want_room("lease-1", 8)
    w.tick()
    request = w.request("b")
    w.end_room("lease-1")
    w.finish(busy)
    w.run_effects()
    assert request in w.granted


def test_what_an_outsider_has_not_taken_yet_is_not_given_away():
    """Its process is measured: the rest of its lease is promised, as that of a model that still loads."""
    w = World(100, [model("a", 50)])
    w.want_room("lease-1", 40, measured=True)
    w.send(ev.Measured({"lease-1": {"ram": 10}}, {"ram": 70}, 0))
    assert w.state.machine_room("ram") == 40
    w.send(ev.Measured({"lease-1": {"ram": 40}}, {"ram": 40}, 0))
    assert w.state.machine_room("ram") == 40
