"""Nobody starves, and nobody is served at the price of a load that served nobody."""

from pagein.scheduler import events as ev

from .world import World, model


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


def test_a_load_longer_than_the_patience_still_serves_who_asked_for_it():
    """The patience of others counts from the moment it is ready: it is not evicted before its first use (fleet 7)."""
    w = World(10, [model("a", 8), model("b", 8)], patience=30.0)
    first = w.request("a")
    w.tick(1.0)
    second = w.request("b")
    w.tick(60.0)
    w.ready("a")
    assert first in w.granted
    assert w.stops == []
    w.finish(first)
    w.run_effects()
    assert second in w.granted


def test_two_models_that_load_longer_than_the_patience_take_turns():
    """Every load serves the batch that waited for it, however long it takes."""
    w = World(10, [model("a", 8, parallel=2), model("b", 8, parallel=2)], patience=5.0, max_wait=1000.0)
    clients = {w.request("ab"[i % 2]): "ab"[i % 2] for i in range(8)}
    served = 0
    for _ in range(200):
        for name in list(w.leaving):
            w.leave(name)
        w.tick(20.0)
        for name in list(w.loading):
            w.ready(name, seconds=20.0)
        for request in list(w.granted):
            name = clients.pop(request)
            served += 1
            w.finish(request)
            if served < 40:
                clients[w.request(name)] = name
    assert not clients
    assert set(w.ended.values()) == {"finished"}


def test_models_that_load_are_not_asked_to_yield():
    """While one of those in the way loads, its turn has not begun, and the others go on serving."""
    w = World(10, [model("a", 5), model("slow", 5), model("b", 10)], patience=30.0)
    w.send(ev.LoadWanted("slow"))
    first = w.request("a")
    w.ready("a")
    w.request("b")
    w.tick(31.0)
    following = w.request("a")
    w.finish(first)
    assert following in w.granted
    w.ready("slow")
    w.tick(31.0)
    late = w.request("a")
    w.finish(following)
    assert late in w.waiting
    assert "yields its turn to b" in [a for a in w.log if getattr(a, "request_id", None) == late][-1].reason


def test_who_waits_for_the_memory_of_other_programs_holds_nobody_up():
    """A model that the machine has no room for must not keep out one that it has room for."""
    w = World(10, [model("x", 8), model("y", 5)])
    w.send(ev.Measured({}, {"ram": 5}))
    waiting = w.request("x")
    assert "other programs" in w.state.models["x"].last_reason
    served = w.request("y")
    w.run_effects()
    assert served in w.granted
    w.send(ev.Measured({}, {"ram": 20}))
    w.finish(served)
    w.run_effects()
    assert waiting in w.granted
