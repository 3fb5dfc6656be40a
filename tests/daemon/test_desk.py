"""Leases asked for and given back, and what operators are told."""

import asyncio
from dataclasses import replace

import pytest

from pagein.errors import (
    CapabilityMissing,
    InUse,
    LoadFailed,
    ModelNotFound,
    NeverFits,
    QueueFull,
    ShuttingDown,
    WaitTooLong,
    WorkerDied,
)
from pagein.history import TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import BLOCKS_WAY, KV_TENANT_HEADER, Capability, Endpoint, Ready, StateFacts
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.sessions.tenant import tenant_of

from .lab import MIB


async def granted(lab, name):
    """A lease on a model that is brought in for it."""
    acquiring = lab.acquire(name)
    await lab.settle()
    if not acquiring.done():
        lab.child(name).become_ready()
    return await acquiring


async def test_a_lease_says_what_the_request_waited_for(make_lab):
    """The first one waited for a load and an eviction, the second for nothing."""
    lab = make_lab(budget=150 * MIB, a={}, b={})
    lab.desk.release(await granted(lab, "b"), 200, 0.1)
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.now += 4.0
    lab.child("a").become_ready()
    first = await acquiring
    assert (first.waited_seconds, first.load_seconds, first.evicted) == (4.0, 4.0, ("b",))
    assert first.endpoint == lab.child("a").ready.endpoint
    assert first.timeout == 300.0
    second = await lab.desk.acquire("a", Capability.CHAT)
    assert (second.waited_seconds, second.load_seconds, second.evicted) == (0.0, None, ())
    assert len(lab.state.leases) == 2
    for lease in (first, second):
        lab.desk.release(lease, 200, 0.1)
    assert len(lab.state.leases) == 0
    assert lab.state.model_of == {}


async def test_without_state_a_worker_is_told_the_tenant_only(make_lab):
    """What it keeps in memory is kept apart all the same; a worker that keeps nothing by itself is told nothing."""
    lab = make_lab(a={}, b={})
    acquiring = lab.acquire("a")
    await lab.settle()
    facts = StateFacts(BLOCKS_WAY, "", 1, "b", 1, "x", "x")
    ready = Ready("t", Endpoint(socket="/s"), [Capability.CHAT], "1", state=facts)
    child = lab.child("a")
    lab.ram[child.pid] = MIB
    child.becoming.set_result(ready)
    lease = await acquiring
    prepared = await lab.desk.prepare(lease, "/v1/chat/completions", b"{}", TurnOf("conv_1", 0.0))
    assert (prepared.headers, prepared.body) == ({KV_TENANT_HEADER: tenant_of(None, None)}, b"{}")
    lab.desk.account(lease, prepared, Counted(1, 1, restored=0))
    lab.desk.release(lease, 200, 0.1)
    other = await granted(lab, "b")
    assert (await lab.desk.prepare(other, "/v1/chat/completions", b"{}")).headers == {}


async def test_giving_back_twice_does_no_harm(make_lab):
    """A lease ends exactly once, whoever says so again."""
    lab = make_lab(a={"parallel": 2})
    first, second = await granted(lab, "a"), await granted(lab, "a")
    lab.desk.release(first, 200, 0.1)
    lab.desk.release(first, 200, 0.1)
    assert lab.state.leases.count("a") == 1
    lab.desk.release(second, 200, 0.1)


async def test_what_a_model_cannot_do_is_refused_before_it_is_asked_for(make_lab):
    """No load for a request that could never be answered, and none for a name that nobody configured."""
    lab = make_lab(a={})
    with pytest.raises(CapabilityMissing):
        await lab.desk.acquire("a", Capability.RERANK)
    with pytest.raises(ModelNotFound):
        await lab.desk.acquire("z", Capability.CHAT)
    assert lab.log == []


async def test_a_refusal_is_raised(make_lab):
    """The scheduler's error reaches the caller, and the request is over."""
    lab = make_lab(budget=50 * MIB, a={})
    with pytest.raises(NeverFits):
        await lab.desk.acquire("a", Capability.CHAT)
    assert lab.state.model_of == {}


async def test_cancelling_a_wait_gives_the_place_back(make_lab):
    """While it waits, and in the very moment in which it was granted."""
    lab = make_lab(a={"parallel": 1})
    waiting = lab.acquire("a")
    await lab.settle()
    waiting.cancel()
    await lab.settle()
    assert not lab.model("a").waiting
    late = lab.acquire("a")
    await lab.settle()
    lab.child("a").become_ready()
    while not lab.state.leases.count("a"):
        await asyncio.sleep(0)
    assert not late.done()
    late.cancel()
    await lab.settle()
    assert late.cancelled()
    assert lab.state.leases.count("a") == 0
    assert lab.state.model_of == {}


async def test_waiting_requests_hear_every_change(make_lab):
    """Reason and place in the queue."""
    lab = make_lab(a={"parallel": 1})
    lease = await granted(lab, "a")
    told = []
    waiting = [lab.acquire("a", on_wait=lambda reason, place: told.append((place, reason))) for _ in range(2)]
    await lab.settle()
    assert [place for place, _ in told] == [1, 2]
    assert "a is serving 1 request" in told[0][1]
    lab.desk.release(lease, 200, 0.1)
    lab.inbox.post(ev.Ticked())
    assert told[-1][0] == 1
    lab.desk.release(await waiting[0], 200, 0.1)
    lab.desk.release(await waiting[1], 200, 0.1)


async def test_a_worker_that_died_in_the_moment_of_the_grant_is_said_so(make_lab):
    """No lease on a process that is known to be gone."""
    lab = make_lab(a={"parallel": 1})
    first = await granted(lab, "a")
    second = lab.acquire("a")
    await lab.settle()
    lab.desk.release(first, 200, 0.1)
    worker = lab.fleet._crew.workers["a"]
    worker.over = True  # the watch was a step faster than the request
    with pytest.raises(WorkerDied, match="before it could serve"):
        await second
    assert len(lab.state.leases) == 0
    worker.over = False


async def test_an_answer_counts_as_one_only_when_it_was_one(make_lab):
    """What a failed or abandoned request shows about memory, or about a worker's health, is nothing."""
    lab = make_lab(a={})
    for status in (499, 502):
        lab.desk.release(await granted(lab, "a"), status, 0.1)
        assert not lab.model("a").answered
    lab.desk.release(await granted(lab, "a"), 200, 0.1)
    assert lab.model("a").answered


# ── operators ───────────────────────────────────────────────────────────────────────────────────


async def test_a_load_returns_when_resident_and_at_once_when_it_was(make_lab):
    """Loading what is there is no error and starts nothing."""
    lab = make_lab(a={})
    await lab.resident("a")
    await lab.desk.load("a")
    assert lab.loads("a") == 1


async def test_a_load_that_cannot_be_is_refused(make_lab):
    """Too large, not configured, or not servable: the reason, not a wait."""
    lab = make_lab(budget=150 * MIB, a={"need": 200 * MIB}, b={})
    with pytest.raises(NeverFits):
        await lab.desk.load("a")
    with pytest.raises(ModelNotFound):
        await lab.desk.load("z")
    lab.model("b").problem = "its file is missing"
    with pytest.raises(LoadFailed, match="its file is missing"):
        await lab.desk.load("b")


async def test_every_operator_who_waits_for_a_load_is_told_its_end(make_lab):
    """Both hear of the failure, and nobody is left waiting."""
    lab = make_lab(a={})
    loads = [asyncio.ensure_future(lab.desk.load("a")) for _ in range(2)]
    await lab.settle()
    lab.child("a").fail(LoadFailed("no such file"))
    for load in loads:
        with pytest.raises(LoadFailed, match="no such file"):
            await load
    assert lab.desk._loads == {}


async def test_an_operator_who_leaves_does_not_take_a_load_from_those_who_stay(make_lab):
    """One of two operators hangs up, then the other: only then nobody wants it, and it still goes on."""
    lab = make_lab(a={})
    first, second = (asyncio.ensure_future(lab.desk.load("a")) for _ in range(2))
    await lab.settle()
    first.cancel()
    await lab.settle()
    assert lab.model("a").wanted_since is not None
    second.cancel()
    await lab.settle()
    assert lab.model("a").wanted_since is None
    assert lab.desk._loads == {}
    assert not lab.child("a").asked
    lab.child("a").become_ready()
    await lab.settle()
    assert lab.model("a").state is State.RESIDENT


async def test_an_operator_who_leaves_does_not_end_a_load_that_requests_wait_for(make_lab):
    """The client's request is served by the very same process."""
    lab = make_lab(a={})
    loading = asyncio.ensure_future(lab.desk.load("a"))
    await lab.settle()
    client = lab.acquire("a")
    await lab.settle()
    loading.cancel()
    await lab.settle()
    lab.child("a").become_ready()
    lab.desk.release(await client, 200, 0.1)
    assert lab.loads("a") == 1


async def test_an_operator_s_wait_is_bounded(make_lab):
    """After max_wait he is told the reason, the wish is forgotten, and nothing of it is kept."""
    lab = make_lab(budget=150 * MIB, a={}, b={})
    lab.settings.__dict__["scheduler"] = lab.settings.scheduler.model_copy(update={"max_wait": 0.01})
    lease = await granted(lab, "a")
    with pytest.raises(WaitTooLong, match="a in use"):
        await lab.desk.load("b")
    assert lab.model("b").wanted_since is None
    with pytest.raises(WaitTooLong, match="draining"):
        await lab.desk.unload("a")
    assert (lab.desk._loads, lab.desk._unloads) == ({}, {})
    lab.desk.release(lease, 200, 0.1)


async def test_an_unload_lets_requests_finish_and_returns_when_the_memory_is_back(make_lab):
    """It waits for the lease, then for the process, then for the measurement."""
    lab = make_lab(a={})
    lease = await granted(lab, "a")
    unloading = asyncio.ensure_future(lab.desk.unload("a"))
    await lab.settle()
    assert lab.model("a").state is State.DRAINING
    lab.desk.release(lease, 200, 0.1)
    await unloading
    assert lab.model("a").state is State.ABSENT
    await lab.desk.unload("a")


async def test_a_pinned_model_is_not_unloaded(make_lab):
    """The operator is told to unpin it first."""
    lab = make_lab(a={})
    await lab.resident("a")
    lab.desk.set_pin("a", True)
    with pytest.raises(InUse, match="pinned"):
        await lab.desk.unload("a")
    assert lab.model("a").state is State.RESIDENT
    lab.desk.set_pin("a", False)
    await lab.desk.unload("a")


async def test_an_unload_that_a_load_calls_off_is_told_so(make_lab):
    """Two operators contradict each other: the later one wins, the earlier one does not wait for ever."""
    lab = make_lab(a={})
    lease = await granted(lab, "a")
    unloading = asyncio.ensure_future(lab.desk.unload("a"))
    await lab.settle()
    await lab.desk.load("a")
    with pytest.raises(InUse, match="called off"):
        await unloading
    assert lab.model("a").state is State.RESIDENT
    assert (lab.desk._loads, lab.desk._unloads) == ({}, {})
    lab.desk.release(lease, 200, 0.1)


async def test_a_shutdown_answers_everybody_who_waits(make_lab):
    """Requests and operators; also those who come after."""
    lab = make_lab(budget=150 * MIB, a={}, b={"queue": 0})
    lease = await granted(lab, "a")
    waiting = [lab.acquire("b"), asyncio.ensure_future(lab.desk.load("b")), asyncio.ensure_future(lab.desk.unload("a"))]
    await lab.settle()
    assert not lab.desk.drained.is_set()
    lab.inbox.post(ev.ShutdownWanted())
    for wait in waiting:
        with pytest.raises(ShuttingDown):
            await wait
    for late in (lab.desk.load("b"), lab.desk.unload("a"), lab.desk.acquire("b", Capability.CHAT)):
        with pytest.raises(ShuttingDown):
            await late
    lab.desk.release(lease, 200, 0.1)
    assert lab.desk.drained.is_set()


async def test_a_full_queue_is_told_at_once(make_lab):
    """The one too many waits for nothing."""
    lab = make_lab(a={"queue": 0, "parallel": 1})
    lease = await granted(lab, "a")
    with pytest.raises(QueueFull):
        await lab.desk.acquire("a", Capability.CHAT)
    lab.desk.release(lease, 200, 0.1)


async def test_what_cannot_be_read_is_said_to_be_so(make_lab):
    """Nobody knows what a model does whose files are gone: its client is told why, not that it does nothing."""
    lab = make_lab(a={})
    gone = "a/split_plan.json: cannot be opened"
    lab.entries["a"] = replace(lab.entries["a"], capabilities=frozenset(), problem=gone)
    with pytest.raises(LoadFailed, match=gone):
        await lab.desk.acquire("a", Capability.CHAT)
    with pytest.raises(LoadFailed, match=gone):
        await lab.desk.split.view("a")
