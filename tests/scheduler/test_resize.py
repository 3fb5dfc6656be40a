"""The allowance of a worker that lives: less once it gave bytes back, more before it takes any."""

from pagein.errors import DoesNotFit
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load, Renewed, Resize, Retain, Stop, Wake

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


# ── until it is unloaded ────────────────────────────────────────────────────────────────────


def resized(w, count, error=None):
    """The worker answers."""
    w.send(ev.Resized("a", {"ram": count}, error))


def test_what_an_operator_set_holds_until_it_is_unloaded():
    """Also through a sleep, whose end reserves those bytes again; the next load has what is configured."""
    w = World(20, [model("a", 8, adjusts=True), model("b", 16)])
    w.sleepers = {"a"}
    w.finish(_loaded(w, "a"))
    w.send(ev.ResizeWanted("a", 12))
    resized(w, 12)
    w.finish(_loaded(w, "b"))
    assert w.state.models["a"].state is State.ASLEEP
    w.finish(_loaded(w, "a"))
    assert w.last(Wake).allowance == {"ram": 12}
    w.send(ev.UnloadWanted("a"))
    w.run_effects()
    _loaded(w, "a")
    assert w.last(Load).allowance == {"ram": 8}


def test_what_was_set_back_is_as_configured():
    """Then an edited configuration may change it again."""
    w = streaming()
    for count in (6, 8):
        w.send(ev.ResizeWanted("a", count))
        resized(w, count)
    assert w.state.models["a"].usual_need is None


def test_a_worker_that_was_taken_over_keeps_what_was_set():
    """It is told to nobody again: its own record says what it keeps to."""
    w = World(20, [model("a", 8, adjusts=True), model("b", 8)])
    w.send(ev.Adopted("a", {"ram": 5}, {"ram": 4}))
    assert w.state.held("a") == {"ram": 5}
    assert w.state.models["a"].need == {"ram": 5}
    w.send(ev.UnloadWanted("a"))
    w.leaving = ["a"]
    w.run_effects()
    assert w.state.models["a"].need == {"ram": 8}


def test_another_pool_than_that_of_the_weights_is_refused_by_name():
    """Whoever names one must mean the same."""
    w = streaming()
    w.send(ev.ResizeWanted("a", 6, "cuda:0"))
    assert "only what it has of ram can change, not of cuda:0" in w.last(Retain).error.message
    w.send(ev.ResizeWanted("a", 6, "ram"))
    assert w.last(Resize).pool == "ram"


def test_on_a_gpu_the_allowance_is_of_its_pool():
    """What it has of RAM stays as it is."""
    a = model("a", 4, adjusts=True, device="cuda:0")
    a.need["cuda:0"] = 10
    w = World(20, [a])
    w.send(ev.Reconfigured(budgets={"ram": 20, "cuda:0": 16}))
    w.request("a")
    w.run_effects()
    w.send(ev.ResizeWanted("a", 16))
    assert (w.last(Resize).allowance, w.last(Resize).pool) == ({"ram": 4, "cuda:0": 16}, "cuda:0")
    w.send(ev.Resized("a", {"ram": 4, "cuda:0": 16}))
    assert w.state.held("a") == {"ram": 4, "cuda:0": 16}
    w.send(ev.ResizeWanted("a", 17))
    assert w.last(Retain).error.details["pool"] == "cuda:0"


# ── edited in the configuration ─────────────────────────────────────────────────────────────


def edited(w, need, *, own=True, **settings):
    """The file was edited: its own `memory`, or something that leaves it other bytes."""
    names = frozenset({"a"})
    fresh = {"a": model("a", need, **{"adjusts": True, **settings})}
    w.send(ev.Reconfigured(fresh, resized=names) if own else ev.Reconfigured(fresh, allotted=names))


def test_edited_memory_changes_while_the_model_lives():
    """Its requests go on, and it has its new settings once the worker keeps to them."""
    for own in (True, False):
        w = streaming(need=8)
        request = w.request("a")
        edited(w, 12, own=own)
        assert w.last(Resize).allowance == {"ram": 12}
        assert "as its configuration was edited" in w.last(Resize).reason
        assert not [one for one in w.log if isinstance(one, Renewed)]
        resized(w, 12)
        assert w.last(Renewed).lives
        assert (w.state.models["a"].need, w.state.held("a")) == ({"ram": 12}, {"ram": 12})
        w.finish(request)
        assert w.stops == []


def test_edited_memory_that_the_worker_refuses_reloads_it():
    """Once its requests have ended; one of high priority returns by itself."""
    for priority in ("medium", "high"):
        w = streaming(need=8, priority=priority)
        request = w.request("a")
        edited(w, 4, priority=priority)
        resized(w, 4, DoesNotFit(5, 4, {}, ""))
        assert w.stops == []
        assert w.state.held("a") == {"ram": 8}
        w.finish(request)
        w.run_effects()
        assert w.stops == ["a"]
        assert w.state.models["a"].need == {"ram": 4}
        assert (w.state.models["a"].state is State.RESIDENT) == (priority == "high")


def test_edited_memory_that_is_not_free_reloads_it():
    """Others leave for a load, and never for a resize."""
    w = World(20, [model("a", 8, adjusts=True), model("b", 8)])
    w.finish(_loaded(w, "a"))
    w.finish(_loaded(w, "b"))
    edited(w, 13)
    assert not [one for one in w.log if isinstance(one, Resize)]
    assert w.last(Stop).model == "a"


def test_what_cannot_live_with_other_bytes_reloads():
    """An engine that takes what it takes, another pool, a file that is gone, a model that is not there."""
    other_pool = model("a", 6, adjusts=True)
    other_pool.need["cuda:0"] = 3
    for fresh in (model("a", 6), other_pool, model("a", 6, adjusts=True, problem="its file is gone")):
        w = streaming(need=8)
        w.send(ev.Reconfigured({"a": fresh}, resized=frozenset({"a"})))
        assert w.last(Stop).model == "a"
    away = World(20, [model("a", 8, adjusts=True)])
    edited(away, 6)
    assert (away.state.models["a"].need, away.last(Renewed).lives) == ({"ram": 6}, False)


def test_an_operators_bytes_stand_against_others_changes_and_not_against_an_edit():
    """Somebody set them for this model; who edits this model's own `memory` wants that instead."""
    w = streaming(need=8)
    w.send(ev.ResizeWanted("a", 6))
    resized(w, 6)
    edited(w, 10, own=False)
    assert len([one for one in w.log if isinstance(one, Resize)]) == 1
    assert (w.state.models["a"].allowance, w.last(Renewed).lives) == ({"ram": 6}, True)
    assert "keeps 6 B of ram that were set" in w.last(Renewed).reason
    edited(w, 12)
    resized(w, 12)
    assert (w.state.models["a"].need, w.state.models["a"].usual_need) == ({"ram": 12}, None)


def test_what_it_has_already_is_taken_at_once():
    """The operator tried it out, and then wrote it down."""
    w = streaming(need=8)
    w.send(ev.ResizeWanted("a", 6))
    resized(w, 6)
    edited(w, 6)
    assert (w.last(Renewed).lives, w.state.models["a"].usual_need) == (True, None)


def test_a_worker_that_ends_while_it_is_told_leaves_the_edit_to_the_next_load():
    """The next one has the new bytes, however the last one ended."""
    w = streaming(need=8)
    edited(w, 12)
    w.dies("a")
    w.freed("a")
    assert w.state.models["a"].need == {"ram": 12}
    assert not w.last(Renewed).lives
    resized(w, 12)
    assert w.state.held("a") == {}


def test_an_edit_that_comes_while_another_is_under_way_reloads():
    """The worker answers the first; what it is to have then is the second, from its next load on."""
    w = streaming(need=8)
    request = w.request("a")
    edited(w, 12)
    edited(w, 6)
    resized(w, 12)
    assert w.state.held("a") == {"ram": 12}
    w.finish(request)
    w.run_effects()
    assert w.state.models["a"].need == {"ram": 6}


def test_what_outgrew_its_allowance_loads_with_more_than_was_set():
    """The guess that a kill taught is worth more than what was configured before."""
    w = World(20_000_000_000, [model("a", 4_000_000_000, adjusts=True)], watched=frozenset({"ram"}))
    w.finish(_loaded(w, "a"))
    w.send(ev.ResizeWanted("a", 5_000_000_000))
    resized(w, 5_000_000_000)
    w.tick(10)
    w.send(ev.Measured({"a": {"ram": 9_000_000_000}}))
    w.run_effects()
    assert w.state.models["a"].need["ram"] > 9_000_000_000
