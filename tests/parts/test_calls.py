"""Calls by task: each takes what it needs, gives it back, and computes what the whole model computes."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

torch = pytest.importorskip("torch")

from pagein.catalog.split.plan import Role, Task
from pagein.errors import ModelUnsuited, NotResident, TaskUnclear, UnknownTask
from pagein.parts.splitting.making import PartMaking
from tests.parts.served import HEADS, PARTS, Net, ids, net, split_net

pytestmark = pytest.mark.torch


@pytest.fixture
def pair(tmp_path, load):
    """The whole net, and the same as parts."""
    whole = net()
    split_net(tmp_path, whole)
    with torch.no_grad():
        yield whole, load(tmp_path, build=Net)


def states(model):
    return {one.part: one.state for one in model.pagein.report().parts}


def leases(model):
    return {one.part: one.leases for one in model.pagein.report().parts}


def cool_down(model):
    """Let everything go that can."""
    return [name for name in PARTS if model.pagein.unload(name)]


def test_a_task_is_bit_identical_and_loads_its_parts_alone(pair):
    """A call by task gives the whole model's bits, and brings in nothing that the task does not need."""
    whole, model = pair
    for task in HEADS:
        assert torch.equal(model(ids(), task=task), whole(ids(), task))
        assert {name for name, state in states(model).items() if state == "hot"} == {"backbone", task}
        assert cool_down(model) == [task]
    assert torch.equal(model(ids(), task="words"), whole(ids(), "words"))


def test_the_class_and_the_names_are_the_ordinary_ones(pair):
    """The model is an instance of its ordinary class, with the same parameters in the same order."""
    whole, model = pair
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    shapes = [(name, one.shape, one.dtype, one.requires_grad) for name, one in whole.named_parameters()]
    assert [(name, one.shape, one.dtype, one.requires_grad) for name, one in model.named_parameters()] == shapes


def test_a_task_that_is_not_in_the_plan_is_refused(pair):
    """Unknown tasks are refused by the plan's list, whatever they look like; case is folded."""
    whole, model = pair
    for task in ("nope", "../tag", "tag\0", "TAG ", "ſcore", ""):
        with pytest.raises(UnknownTask):
            model(ids(), task=task)
    assert torch.equal(model(ids(), task="TAG"), whole(ids(), "tag"))


def test_a_call_without_a_task_needs_a_lease(pair):
    """With several tasks a call that names none is refused, unless a lease says which."""
    whole, model = pair
    with pytest.raises(TaskUnclear, match="no lease is held"):
        model(ids())
    with model.lease("score"):
        assert torch.equal(model(ids()), whole(ids(), "score"))
        assert leases(model)["score"] == 1
    assert set(leases(model).values()) == {0}


def test_a_lease_keeps_its_parts(pair):
    """While a lease is held its parts cannot be unloaded; calls of other tasks inside it end by themselves."""
    whole, model = pair
    with model.lease("tag"):
        assert torch.equal(model(ids(), task="score"), whole(ids(), "score"))
        assert cool_down(model) == ["score"]
        assert torch.equal(model.tag(torch.ones(1, 16)), whole.tag(torch.ones(1, 16)))
        with model.lease("classify"):
            assert torch.equal(model(ids()), whole(ids(), "classify"))
        assert torch.equal(model(ids()), whole(ids(), "tag"))
    assert sorted(cool_down(model)) == ["classify", "tag"]


def test_an_error_in_forward_ends_the_lease(pair):
    """A call that raises gives its parts back, and they can leave (scenario 5)."""
    _, model = pair
    with pytest.raises(IndexError):
        model(torch.full((1, 2), 10_000), task="tag")
    assert set(leases(model).values()) == {0}
    assert cool_down(model) == ["tag"]


def end(stream):
    list(stream)


def close(stream):
    next(stream)
    stream.close()


def drop(stream):
    next(stream)


def fail(stream):
    with pytest.raises(KeyError):
        stream.throw(KeyError())


def never_begin(stream):
    pass


@pytest.mark.parametrize("way", [end, close, drop, fail, never_begin], ids=lambda way: way.__name__)
def test_a_stream_keeps_its_lease_until_it_ends(pair, way):
    """A stream's part stays while it lasts, and its lease ends once, however the stream ends (scenario 3)."""
    _, model = pair
    stream = model(ids(), task="stream")
    assert leases(model)["tag"] == 1
    assert cool_down(model) == []
    way(stream)
    del stream
    assert set(leases(model).values()) == {0}
    assert cool_down(model) == ["tag"]


def test_what_comes_later_is_refused(pair, monkeypatch):
    """An answer that is awaited would outlive the call's lease: it is refused, and a lease around it is asked for."""
    _, model = pair

    async def later(self, ids, task):
        return self.tag(ids)

    monkeypatch.setattr(Net, "forward", later)
    with pytest.raises(ModelUnsuited, match="later"):
        model(ids(), task="tag")
    assert set(leases(model).values()) == {0}


def test_a_generator_that_is_dropped_ends_its_lease(pair):
    """A lease in a generator of the caller's ends when nobody refers to the generator any more."""
    _, model = pair

    def answers():
        with model.lease("tag"):
            while True:
                yield model(ids())

    running = answers()
    next(running)
    assert leases(model)["tag"] == 1
    del running
    assert leases(model)["tag"] == 0


def test_generators_with_leases_do_not_mix(pair):
    """A lease that a waiting generator holds is not that of who resumes another one meanwhile (scenario 4)."""
    whole, model = pair

    def answers(task):
        with model.lease(task):
            for seed in range(4):
                yield torch.equal(model(ids(seed)), whole(ids(seed), task))

    assert all(pair for step in zip(*map(answers, HEADS), strict=True) for pair in step)
    first, second = answers("tag"), answers("score")
    next(first), next(second)
    with pytest.raises(TaskUnclear):
        model(ids())


def test_coroutines_with_leases_do_not_mix(pair):
    """Each coroutine's calls go by its own lease, also in a thread that it hands them to."""
    whole, model = pair

    @torch.no_grad()  # by thread, too; attention computes otherwise without
    def call(seed):
        return model(ids(seed))

    async def answers(task):
        with model.lease(task):
            for seed in range(4):
                assert torch.equal(model(ids(seed)), whole(ids(seed), task))
                await asyncio.sleep(0)
                assert torch.equal(await asyncio.to_thread(call, seed), whole(ids(seed), task))

    async def all_of_them():
        await asyncio.gather(*map(answers, HEADS))

    asyncio.run(all_of_them())


def test_a_lease_that_is_lost_ends(pair):
    """A lease that nobody ended ends when it is collected."""
    _, model = pair
    lost = model.lease("tag").begin()
    assert leases(model)["tag"] == 1
    del lost
    gc.collect()
    assert leases(model)["tag"] == 0


def test_a_lease_ends_once(pair):
    """Ending a lease again changes nothing, from any thread."""
    _, model = pair
    one, other = model.lease("tag").begin(), model.lease("tag").begin()
    threads = [threading.Thread(target=one.end) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leases(model)["tag"] == 1
    other.end()


def test_a_module_outside_every_lease_trips(pair):
    """A part's module called outside a lease is refused, also while the part is there; that loads nothing."""
    _, model = pair
    model(ids(), task="tag")
    assert states(model)["tag"] == "hot"
    with pytest.raises(NotResident, match="tag"):
        model.tag(torch.ones(1, 16))
    with pytest.raises(NotResident, match="classify"):
        model.classify(torch.ones(1, 16))
    assert states(model)["classify"] == "cold"


def test_a_model_with_one_task_needs_no_word_of_it(tmp_path, load):
    """A model of one task is called as ever."""
    whole = net()
    names = tuple(name for names in PARTS.values() for name in names)
    parts = {"backbone": PartMaking(Role.BACKBONE, names)}
    split_net(tmp_path, whole, tasks={"score": Task("score", ("backbone",), "tokens")}, parts=parts)
    model = load(tmp_path, build=Net)
    with torch.no_grad():
        assert torch.equal(model(ids()), whole(ids(), "score"))
