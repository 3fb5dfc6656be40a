"""The allowance of a worker that lives: less once it gave bytes back, more before it takes any."""

from pagein.errors import DoesNotFit
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load, Resize, Retain

from .world import World, model


def streaming(need=8, budget=20, **settings):
    """A loaded model whose engine streams, beside another one that is not loaded."""
    w = World(budget, [model("a", need, adjusts=True, **settings), model("b", 8)])
    w.finish(_loaded(w, "a"))
    return w


def _loaded(w, name):
    request = w.request(name)
    w.run_effects()
    return request


def test_bytes_are_given_back_once_the_worker_says_so():
    """While it is asked the ledger keeps the larger figure; what it gave back can be loaded into."""
    w = streaming(need=14)
    w.send(ev.ResizeWanted("a", 6))
    assert w.last(Resize).allowance == {"ram": 6}
    assert "from 14 B to 6 B" in w.last(Resize).reason
    assert w.state.held("a") == {"ram": 14}
    w.send(ev.Measured({"a": {"ram": 5}}))
    w.send(ev.Resized("a", {"ram": 6}))
    assert w.state.held("a") == {"ram": 6}
    assert w.state.models["a"].allowance == {"ram": 6}
    w.request("b")
    assert w.last(Load).model == "b"


def test_bytes_that_it_gains_are_reserved_before_it_takes_them():
    """Nobody else can be given them while it is told."""
    w = streaming(need=8)
    w.send(ev.ResizeWanted("a", 14))
    assert w.state.held("a") == {"ram": 14}
    w.request("b")
    assert w.state.models["b"].state is State.ABSENT
    w.send(ev.Resized("a", {"ram": 14}))
    assert w.state.held("a") == {"ram": 14}


def test_more_than_is_free_is_refused_with_both_numbers():
    """Nothing is evicted for it and nothing changes."""
    w = streaming(need=8)
    w.send(ev.ResizeWanted("a", 21))
    error = w.last(Retain).error
    assert (error.code, error.details["need_bytes"], error.details["free_bytes"]) == ("no_room", 13, 12)
    assert w.state.held("a") == {"ram": 8}


def test_a_worker_that_refuses_keeps_what_it_had():
    """Whichever way it was to change."""
    for count in (4, 14):
        w = streaming(need=8)
        w.send(ev.ResizeWanted("a", count))
        w.send(ev.Resized("a", {"ram": count}, DoesNotFit(5, 4, {}, "")))
        assert w.state.held("a") == {"ram": 8}
        assert w.state.models["a"].allowance == {"ram": 8}
        assert not w.state.models["a"].resizing


def test_only_a_loaded_model_that_streams_can_change():
    """Others are refused with the reason, also a second wish while the first is under way."""
    w = streaming()
    _loaded(w, "b")
    w.send(ev.ResizeWanted("b", 4))
    assert "cannot stream" in w.last(Retain).error.message
    w.send(ev.ResizeWanted("a", 6))
    w.send(ev.ResizeWanted("a", 7))
    assert "being changed already" in w.last(Retain).error.message
    absent = World(20, [model("a", 8, adjusts=True)])
    absent.send(ev.ResizeWanted("a", 4))
    assert "only that of a loaded model" in absent.last(Retain).error.message


def test_a_worker_that_ends_meanwhile_is_forgotten():
    """The late answer changes nothing, and the next load has what is configured."""
    w = streaming(need=8)
    w.send(ev.ResizeWanted("a", 14))
    w.dies("a")
    w.freed("a")
    w.send(ev.Resized("a", {"ram": 14}, DoesNotFit(1, 1, {}, "")))
    assert w.state.held("a") == {}
    w.tick(1000)
    _loaded(w, "a")
    assert w.state.held("a") == {"ram": 8}


def test_a_late_sample_makes_no_liar_of_it():
    """What was measured just before it gave bytes back is not held against it; what it takes later is."""
    w = World(20_000_000_000, [model("a", 10_000_000_000, adjusts=True)], watched=frozenset({"ram"}))
    w.finish(_loaded(w, "a"))
    w.send(ev.ResizeWanted("a", 1_000_000_000))
    w.send(ev.Resized("a", {"ram": 1_000_000_000}))
    w.send(ev.Measured({"a": {"ram": 9_000_000_000}}))
    assert w.state.models["a"].state is State.RESIDENT
    w.tick(10)
    assert w.state.models["a"].state is not State.RESIDENT
