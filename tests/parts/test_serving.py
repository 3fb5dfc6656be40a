"""What a server needs of parts beside calls: events, whole leases, other memory while calls run, levels."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.errors import InUse, PartAway, PartRefused, PartsBusy, PartTooLarge
from pagein.parts.events import PartEventKind, PartEvents
from pagein.parts.rollout import Level
from tests.parts.served import HEADS, Net, add_part, ids, net, source, split_net

pytestmark = pytest.mark.torch


@pytest.fixture
def model(tmp_path, load):
    """The small net, split."""
    split_net(tmp_path, net())
    return load(tmp_path, build=Net)


def states(model) -> dict[str, tuple[str, int]]:
    return {one.part: (one.state, one.leases) for one in model.pagein.report().parts}


def size(model, *names: str) -> int:
    return sum(one.file_bytes for one in model.pagein.report().parts if one.part in names)


def seen(model, after: int = 0) -> list[tuple[str, str]]:
    return [(one.kind.value, one.part) for one in model.pagein.events.after(after)]


def test_events_are_counted_and_the_oldest_forgotten():
    """Whoever looks again is told what came since, as far as it is kept."""
    events = PartEvents(kept=3, clock=lambda: 5.0)
    for number in range(5):
        events.add(PartEventKind.LOAD, f"p{number}")
    assert [(one.seq, one.part, one.time) for one in events.after(0)] == [
        (3, "p2", 5.0),
        (4, "p3", 5.0),
        (5, "p4", 5.0),
    ]
    assert [one.part for one in events.after(4)] == ["p4"]
    assert events.after(5) == []


def test_loads_and_departures_are_events_with_their_numbers(model):
    """For whom, how many bytes, how long, and why."""
    model(ids(), task="tag")
    model.pagein.unload("tag")
    load, gone = model.pagein.events.after(2)
    assert (load.kind, load.part, load.task, load.bytes) == (PartEventKind.LOAD, "tag", "tag", size(model, "tag"))
    assert load.seconds is not None
    assert (gone.kind, gone.part, gone.bytes, gone.reason) == (
        PartEventKind.EVICT,
        "tag",
        load.bytes,
        "unloaded by hand",
    )


def test_a_part_that_leaves_for_another_says_for_which(tmp_path, load):
    """And a call that could not be served is an event, too."""
    split_net(tmp_path, net())
    whole = load(tmp_path, build=Net)
    model = load(tmp_path, memory=size(whole, "backbone", "attend"), build=Net, wait=0.0)
    model(ids(), task="tag")
    with model.lease("tag"), pytest.raises(PartsBusy):
        model(ids(), task="attend")
    refused = model.pagein.events.after(0)[-1]
    assert (refused.kind, refused.part, refused.task) == (PartEventKind.REFUSE, "attend", "attend")
    model.pagein.wait = 60.0
    model(ids(), task="attend")
    gone, came = model.pagein.events.after(refused.seq)
    assert (gone.part, came.part) == ("tag", "attend")
    assert "for 'attend': idle for" in gone.reason


def test_a_lease_on_the_whole_takes_every_part_at_any_level(model):
    """Also where calls of a task are refused what is away."""
    model.pagein.set_level("backbone")
    with pytest.raises(PartAway):
        model(ids(), task="tag")
    with model.pagein.lease("tag", whole=True):
        assert set(states(model).values()) == {("hot", 1)}
        model(ids(), task="tag")


def test_a_lease_on_the_whole_leaves_out_what_cannot_be_there_with_its_task(tmp_path, load):
    """Two parts of one place: the task's own comes, the other does not, and nothing waits for ever."""
    from pagein.catalog.split.plan import Role, Task

    split_net(tmp_path, net())
    tensors = {name: source(one) for name, one in net(1).state_dict().items() if name in ("tag.weight", "tag.bias")}
    tasks = {"tag2": Task("tag2", ("backbone", "tag2"), "tokens")}
    add_part(tmp_path, "tag2", tensors, role=Role.TASK, replaces="tag", tasks=tasks)
    model = load(tmp_path, build=Net, wait=0.0)
    for task, other in (("tag", "tag2"), ("tag2", "tag")):
        with model.pagein.lease(task, whole=True):
            model(ids(), task=task)
            found = states(model)
            assert (found[task], found[other]) == (("hot", 1), ("cold", 0))
            assert {found[name] for name in HEADS if name not in (task, other)} == {("hot", 1)}
    model.pagein.replace("tag", "tag2")
    with model.pagein.lease("tag", whole=True):
        assert (states(model)["tag2"], states(model)["tag"]) == (("hot", 1), ("cold", 0))
    with model.pagein.lease("score", whole=True):
        assert sorted(states(model)[name][0] for name in ("tag", "tag2")) == ["cold", "hot"]


def test_calls_within_a_leases_own_block_take_no_lease_beside_it(model):
    """One request is one use of each part."""
    with model.lease("tag") as held:
        with held.only():
            model.body.register_forward_hook(lambda *_: counts.append(states(model)["tag"][1]))
            counts: list[int] = []
            model(ids(), task="tag")
        model(ids(), task="tag")
    assert counts == [1, 2]


def test_a_wait_for_memory_ends_when_nobody_wants_it(tmp_path, load):
    """A call whose caller has gone leaves the line."""
    split_net(tmp_path, net())
    whole = load(tmp_path, build=Net)
    model = load(tmp_path, memory=size(whole, "backbone", "attend"), build=Net)
    asked = iter([True, False])
    with model.lease("attend"), pytest.raises(PartsBusy, match="nobody waits"):
        model.pagein.lease("tag", wanted=lambda: next(asked)).begin()
    assert model.pagein.report().waiting == 0


def test_fewer_bytes_are_kept_to_before_it_is_said(model):
    """What is idle leaves; what is used is waited for."""
    for task in HEADS:
        model(ids(), task=task)
    count = size(model, "backbone", "tag")
    lease = model.lease("tag").begin()
    ended = threading.Thread(target=lambda: model.pagein.keep_within(count, 60.0))
    ended.start()
    while model.pagein.report().owned > count:
        pass
    ended.join(60)
    assert states(model)["tag"] == ("hot", 1)
    assert model.pagein.report().allowance == count
    with pytest.raises(InUse, match="tag"):
        model.pagein.keep_within(size(model, "backbone"), 0.0)
    assert model.pagein.report().allowance == count
    waiting = threading.Thread(target=lambda: model.pagein.keep_within(size(model, "backbone"), 60.0))
    waiting.start()
    while model.pagein.report().allowance == count:
        pass
    lease.end()
    waiting.join(60)
    assert [name for name, (state, _) in states(model).items() if state == "hot"] == ["backbone"]


def test_bytes_that_parts_need_which_stay_are_refused(model):
    """Pinned ones, and at level manual all that are there; both numbers are told, and nothing changed."""
    before = model.pagein.report().allowance
    with pytest.raises(PartTooLarge) as caught:
        model.pagein.keep_within(size(model, "backbone") - 1, 0.0)
    assert caught.value.details["need_bytes"] == caught.value.details["available_bytes"] + 1
    model(ids(), task="tag")
    model.pagein.set_level("manual")
    with pytest.raises(PartTooLarge, match="backbone and tag"):
        model.pagein.keep_within(size(model, "backbone"), 0.0)
    assert model.pagein.report().allowance == before
    assert states(model)["tag"] == ("hot", 0)


def test_pins_by_hand_outlast_level_off(model):
    """Back from `off` only those pins go that it brought; what was pinned by hand, before or meanwhile, stays."""

    def pinned():
        return {one.part for one in model.pagein.report().parts if one.pinned}

    model.pagein.pin("tag")
    model.pagein.set_level("off")
    model.pagein.refresh()  # keeps what joined, and is asked of all again
    assert pinned() == {"backbone", "classify", "tag", "score", "attend"}
    model.pagein.pin("score")
    model.pagein.set_level("auto")
    assert pinned() == {"backbone", "tag", "score"}
    model.pagein.pin("tag", False)
    model.pagein.set_level("off")
    model.pagein.pin("score", False)
    model.pagein.set_level("manual")
    assert pinned() == {"backbone"}


def test_level_off_that_does_not_fit_leaves_level_and_pins(tmp_path, load):
    """What was pinned before stays pinned, and nothing else."""
    split_net(tmp_path, net())
    whole = load(tmp_path, build=Net)
    model = load(tmp_path, memory=size(whole, "backbone", "tag", "score"), build=Net, wait=0.0)
    model.pagein.pin("tag")
    with pytest.raises(PartTooLarge):
        model.pagein.set_level("off")
    assert model.pagein.level is Level.AUTO
    assert [one.part for one in model.pagein.report().parts if one.pinned] == ["backbone", "tag"]


def test_bytes_that_come_in_are_a_sign_of_life(model):
    """They are counted as they are read, not once they are all there."""
    before = model.pagein.bytes_read
    model(ids(), task="tag")
    assert model.pagein.bytes_read == before + size(model, "tag")


def test_pins_are_events_once(model):
    """Pinning what is pinned is none."""
    for pinned in (True, True, False, False):
        model.pagein.pin("tag", pinned)
    assert seen(model)[-2:] == [("pin", "tag"), ("unpin", "tag")]


def test_a_closed_model_says_so(tmp_path, load):
    """What is not in memory cannot come any more, and the reason is not that of a damaged file."""
    split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    model.pagein.close()
    with pytest.raises(PartRefused, match="the model was closed"):
        model(ids(), task="tag")
