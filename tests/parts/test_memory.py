"""Memory: what parts take, what they give back, who leaves for whom, and what is refused."""

from __future__ import annotations

import gc
import os
import re
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import PartAway, PartsBusy, PartTooLarge
from pagein.parts.guard import GuardRules
from tests.parts.served import HEADS, Net, ids, net, split_net
from tests.parts.test_stampede import room_for_one

pytestmark = pytest.mark.torch
AT_ONCE = GuardRules(residency_loads=0.0)


def anonymous() -> int:
    """Bytes of this process that belong to no file, resident now; in the kernel's own, exact count."""
    text = Path("/proc/self/smaps_rollup").read_text()
    found = re.search(r"^Anonymous:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def reports(model):
    return {one.part: one for one in model.pagein.report().parts}


def test_memory_is_back_after_every_eviction(tmp_path, load):
    """A part of some MiB is given back whole when it leaves, over many rounds (scenario 11)."""
    plan = split_net(tmp_path, net(wide=150_000))
    size = plan.parts["classify"].file("stored").nbytes
    assert size > 10 * 1024**2
    model = load(tmp_path, build=lambda: Net(150_000))
    gc.collect()
    model.pagein.warm("classify"), model.pagein.unload("classify")
    before = anonymous()
    for _ in range(20):
        with torch.no_grad():
            model.pagein.warm("classify")
            assert anonymous() - before > 0.9 * size
            assert model.pagein.unload("classify")
        assert anonymous() - before < 0.05 * size


def test_held_tensors_are_a_use(tmp_path, load):
    """Someone who holds a part's tensor beside all leases keeps the part, with its true values, until they let go."""
    whole = net()
    split_net(tmp_path, whole)
    model = load(tmp_path, build=Net)
    with model.lease("tag"):
        held = model.tag.weight
    assert not model.pagein.unload("tag")
    assert reports(model)["tag"].held_outside
    assert torch.equal(held, whole.tag.weight)
    with torch.no_grad():
        assert torch.equal(model(ids(), task="tag"), whole(ids(), "tag"))
    del held
    assert not reports(model)["tag"].held_outside
    assert model.pagein.unload("tag")


def test_who_holds_tensors_is_told(tmp_path, load):
    """A graph of autograd keeps the weights that it was computed from; who waits for that room is told so."""
    model = load(tmp_path, room_for_one(split_net(tmp_path, net())), build=Net, rules=AT_ONCE)
    answer = model(ids(), task="classify")
    model.pagein.wait = 0.5
    with pytest.raises(PartsBusy, match="tensors of classify beside all leases"):
        model(ids(), task="attend")
    answer.sum().backward()
    del answer
    model.pagein.wait = 60.0
    model(ids(), task="attend")
    assert reports(model)["classify"].state == "cold"


def test_one_leaves_for_another(tmp_path, load):
    """With room for one, a call lets the idle one go; the bytes stay within the allowance."""
    model = load(tmp_path, room_for_one(split_net(tmp_path, net())), build=Net, rules=AT_ONCE)
    for task in HEADS * 2:
        model(ids(), task=task)
        assert [name for name, one in reports(model).items() if one.state == "hot"] == sorted({"backbone", task})
        report = model.pagein.report()
        assert report.owned <= report.allowance


def test_in_use_and_pinned_parts_stay(tmp_path, load):
    """A call that needs room waits, and is refused with both numbers; what is leased or pinned does not leave."""
    model = load(tmp_path, room_for_one(split_net(tmp_path, net())), build=Net, rules=AT_ONCE)
    model.pagein.wait = 0.0
    with model.lease("attend"), pytest.raises(PartsBusy, match="in use"):
        model(ids(), task="classify")
    model.pagein.pin("attend")
    with pytest.raises(PartTooLarge):
        model(ids(), task="classify")
    assert reports(model)["attend"].state == "hot"
    model.pagein.pin("attend", False)
    model.pagein.wait = 60.0
    model(ids(), task="classify")


def test_what_can_never_fit_is_refused_before_anything_leaves(tmp_path, load):
    """A part larger than the allowance is refused at once; nothing is read or evicted for it (scenario 12)."""
    plan = split_net(tmp_path, net())
    sizes = {name: part.file("stored").nbytes for name, part in plan.parts.items()}
    model = load(tmp_path, sizes["backbone"] + sizes["tag"], build=Net)
    model(ids(), task="tag")
    with pytest.raises(PartTooLarge) as told:
        model(ids(), task="attend")
    assert told.value.details["need_bytes"] == sizes["attend"]
    assert told.value.details["available_bytes"] == sizes["tag"]
    assert reports(model)["tag"].state == "hot"
    assert reports(model)["attend"].loads == 0


def test_a_stream_of_calls_does_not_starve_another(tmp_path, load):
    """Who waits for room gets it: after the patience no further call takes what must leave for it."""
    model = load(tmp_path, room_for_one(split_net(tmp_path, net())), build=Net, rules=AT_ONCE)
    line = model.pagein.residency.line
    line._patience = 0.0
    lease = model.lease("attend").begin()
    thread = threading.Thread(target=model, args=(ids(),), kwargs={"task": "classify"})
    thread.start()
    while not line._yielding:
        os.sched_yield()
    refused = []

    def call() -> None:
        try:
            model.lease("attend", wait=0.0).begin()
        except PartsBusy as error:
            refused.append(str(error))

    other = threading.Thread(target=call)  # in this one the lease that is held would be shared
    other.start()
    other.join()
    assert len(refused) == 1
    with model.lease("attend"):  # who has it already may go on with it
        pass
    lease.end()
    thread.join()
    assert reports(model)["classify"].loads == 1
    model(ids(), task="attend")


def test_idle_parts_leave_above_the_watermark(tmp_path, load):
    """A pass lets go of what the guard names, and of nothing that is used."""
    plan = split_net(tmp_path, net())
    total = sum(part.file("stored").nbytes for part in plan.parts.values())
    model = load(tmp_path, total, build=Net, rules=GuardRules(residency_loads=0.0, pass_idle=0.0))
    for task in HEADS:
        model.pagein.warm(task)
    with model.lease("attend"):
        assert model.pagein.sweep() > 0
        assert reports(model)["attend"].state == "hot"
    report = model.pagein.report()
    assert report.owned <= 0.85 * report.allowance
    assert model.pagein.sweep() == 0


def test_without_a_limit_nothing_leaves(tmp_path, load):
    """Where nobody said how much memory the parts may take, all of them stay."""
    split_net(tmp_path, net())
    model = load(tmp_path, build=Net, rules=GuardRules(residency_loads=0.0, pass_idle=0.0))
    for task in HEADS:
        model.pagein.warm(task)
    assert model.pagein.sweep() == 0
    assert {one.state for one in reports(model).values()} == {"hot"}


def test_less_memory_takes_effect(tmp_path, load):
    """With a lower allowance idle parts leave at once, those in use when they are idle."""
    plan = split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    for task in HEADS:
        model.pagein.warm(task)
    with model.lease("tag"):
        model.pagein.set_memory(plan.parts["backbone"].file("stored").nbytes)
        assert [name for name, one in reports(model).items() if one.state == "hot"] == ["backbone", "tag"]
    assert model.pagein.sweep() == 1
    with pytest.raises(PartTooLarge):
        model(ids(), task="tag")


def test_taking_turns_is_bounded_and_told(tmp_path, load):
    """More parts in turn than fit: every call is answered, and the report says that parts push each other out."""
    whole = net()
    model = load(tmp_path, room_for_one(split_net(tmp_path, whole)), build=Net)
    with torch.no_grad():
        for round_ in range(12):
            for task in HEADS:
                assert torch.equal(model(ids(round_), task=task), whole(ids(round_), task))
    thrash = model.pagein.report().thrash
    assert thrash.thrashing
    assert thrash.bound is not None
    assert thrash.reloads <= thrash.bound


def test_levels(tmp_path, load):
    """off: all is loaded and stays; manual: nothing leaves unasked; backbone: nothing comes unasked; and back again
    without a restart, the answers being the same bits (scenario 19)."""
    whole = net()
    plan = split_net(tmp_path, whole)
    model = load(tmp_path, build=Net, level="off")
    with torch.no_grad():
        full = {task: model(ids(), task=task) for task in HEADS}
    assert {one.state for one in reports(model).values()} == {"hot"}
    assert {one.pinned for one in reports(model).values()} == {True}
    model.pagein.set_level("auto")
    assert all(model.pagein.unload(task) for task in HEADS)
    with torch.no_grad():
        for task in HEADS:
            assert torch.equal(model(ids(), task=task), full[task])
            assert torch.equal(full[task], whole(ids(), task))
    model.pagein.set_level("backbone")
    assert model.pagein.unload("tag")
    with pytest.raises(PartAway, match="by hand"):
        model(ids(), task="tag")
    model.pagein.load("tag")
    model(ids(), task="tag")
    model.pagein.set_level("manual")
    model.pagein.wait = 0.2
    model.pagein.set_memory(room_for_one(plan))
    model.pagein.unload("classify")
    with pytest.raises(PartsBusy, match="by hand"):
        model(ids(), task="classify")


def test_the_report_is_true_and_waits_for_nobody(tmp_path, load):
    """Each part's state, bytes, leases and last use; asked for while a load stands still (scenario 18)."""
    plan = split_net(tmp_path, net())
    model = load(tmp_path, build=Net)
    reached, go_on = threading.Event(), threading.Event()
    reader = model.pagein.residency.reader
    read = reader._read

    def slow(descriptor, into, offset):
        reached.set()
        go_on.wait()
        return read(descriptor, into, offset)

    reader._read = slow
    thread = threading.Thread(target=model.pagein.warm, args=("tag",))
    thread.start()
    reached.wait()
    one = reports(model)["tag"]
    assert (one.state, one.leases, one.bytes, one.loads) == ("loading", 1, one.file_bytes, 0)
    assert one.digest == plan.parts["tag"].file("stored").sha256
    go_on.set()
    thread.join()
    one = reports(model)["tag"]
    assert (one.state, one.leases, one.loads) == ("hot", 0, 1)
    assert one.idle_seconds is not None
    assert one.load_seconds is not None
    assert "tag" in str(model.pagein.report().as_json())
