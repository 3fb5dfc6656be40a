"""Loads and stops carried out, and what becomes of workers that do not do what they should."""

import asyncio
import logging

import pytest

from pagein.errors import LoadFailed
from pagein.protocol import Capability, Endpoint
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev

from .lab import MIB

ENDS = (ev.BecameReady, ev.LoadBroke, ev.WorkerExited, ev.Stopped, ev.Freed)


async def test_a_load_and_a_stop_are_reported_once_and_in_order(make_lab):
    """Ready, stopped, freed: each once; the process is gone before its bytes are called free."""
    lab = make_lab(a={})
    child = await lab.resident("a", 50 * MIB)
    await lab.desk.unload("a")
    assert lab.events(*ENDS) == ["BecameReady", "Stopped", "Freed"]
    assert child.graces == [5.0]
    assert lab.meter.last("a") == {}
    assert lab.state.ledgers["ram"].free == 1000 * MIB


async def test_the_log_tells_duration_and_memory_of_every_load_use_and_unload(make_lab):
    """Row G13: bytes before and after on each line."""
    lab = make_lab(a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.now += 3.0
    lab.child("a").become_ready(50 * MIB)
    lease = await acquiring
    lab.ram[lab.child("a").pid] = 60 * MIB
    await lab.meter.sample()
    lab.desk.release(lease, 200, 1.5)
    unloading = asyncio.ensure_future(lab.desk.unload("a"))
    await lab.settle()
    await unloading
    load, infer, unload = lab.log_lines("a")
    assert load.startswith(f"load seconds=3.000 before.ram=0 after.ram={50 * MIB} pid={lab.child('a').pid} why=")
    assert infer == f"infer seconds=1.500 before.ram={50 * MIB} after.ram={60 * MIB} request=1 status=200"
    assert unload.startswith(f"unload seconds=0.000 before.ram={60 * MIB} after.ram=0 why=")


async def test_a_failed_load_is_a_line_of_the_log_too(make_lab):
    """How long it took and what was wrong, on one line; the worker's own lines stand above it."""
    lab = make_lab(a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.now += 2.0
    lab.child("a").fail(LoadFailed("no such file\nlast output:\n  x"))
    with pytest.raises(LoadFailed):
        await acquiring
    await lab.settle()
    assert lab.log_lines("a")[0] == 'load seconds=2.000 failed="no such file"'


async def test_the_unload_of_a_shutdown_is_logged_once_with_its_bytes(make_lab):
    """The last measurement is still known then, and a stop in progress does not write a second line."""
    lab = make_lab(a={}, b={})
    slow = await lab.resident("a", 50 * MIB)
    leaving = await lab.resident("b", 40 * MIB)
    leaving.stubborn = slow.stubborn = True
    lab.inbox.post(ev.UnloadWanted("b"))
    await lab.settle()
    ending = asyncio.ensure_future(lab.fleet.stop_all(5.0))
    await lab.settle()
    leaving.end(None)
    await lab.settle()
    slow.end(None)
    await ending
    assert lab.log_lines("a")[1:] == [
        f'unload seconds=0.000 before.ram={50 * MIB} after.ram=0 why="the daemon stops"',
    ]
    assert len([line for line in lab.log_lines("b") if line.startswith("unload")]) == 1


async def test_a_worker_that_dies_while_its_load_is_measured_is_a_failed_load(make_lab):
    """Nobody is granted a lease on a process that is gone; who waited is told why."""
    lab = make_lab(a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    child = lab.child("a")
    child.become_ready()
    child.die()
    with pytest.raises(LoadFailed, match="SIGSEGV"):
        await acquiring
    await lab.settle()
    assert lab.events(*ENDS) == ["LoadBroke", "Freed"]
    assert lab.model("a").state is State.FAILED


async def test_a_worker_that_dies_while_it_is_stopped_is_reported_once(make_lab):
    """Its end is the end that was asked for."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    child.stubborn = True
    unloading = asyncio.ensure_future(lab.desk.unload("a"))
    await lab.settle()
    child.die()
    await unloading
    assert lab.events(*ENDS) == ["BecameReady", "Stopped", "Freed"]
    assert lab.model("a").failures == 0


async def test_a_stop_for_a_worker_that_died_a_moment_ago_changes_nothing(make_lab):
    """The death was reported first; the process is not ended twice, and its bytes are freed once."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    child.die()
    lab.inbox.post(ev.UnloadWanted("a"))
    await lab.settle()
    assert lab.events(*ENDS) in (["BecameReady", "WorkerExited", "Freed"], ["BecameReady", "Stopped", "Freed"])
    assert lab.state.held("a") == {}


async def test_a_load_that_is_stopped_ends_its_process_and_nothing_else(make_lab):
    """No `LoadBroke`: it was asked to leave, so it does not back off, and it can be loaded again at once."""
    lab = make_lab(a={})
    loading = asyncio.ensure_future(lab.desk.load("a"))
    await lab.settle()
    await lab.desk.unload("a")
    with pytest.raises(LoadFailed, match="unloaded by the operator"):
        await loading
    assert lab.events(*ENDS) == ["Stopped", "Freed"]
    assert lab.child("a").kills == 1
    await lab.resident("a")


async def test_a_load_that_is_stopped_before_its_process_exists_starts_none(make_lab):
    """Load and unload in one moment: no process, and the bytes are back."""
    lab = make_lab(a={})
    lab.inbox.post(ev.LoadWanted("a"))
    lab.inbox.post(ev.UnloadWanted("a"))
    await lab.settle()
    assert lab.children == []
    assert lab.events(*ENDS) == ["Stopped", "Freed"]


async def test_a_worker_that_is_stopped_while_its_load_is_measured_was_never_ready(make_lab, monkeypatch):
    """The order to stop came first; being ready is not news any more."""
    lab = make_lab(a={})
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()
    gate = asyncio.Event()
    measured = lab.meter.measure_load

    async def slowly(name):
        await gate.wait()
        return await measured(name)

    monkeypatch.setattr(lab.meter, "measure_load", slowly)
    lab.child("a").become_ready()
    await lab.settle()
    await lab.desk.unload("a")
    gate.set()
    await lab.settle()
    assert lab.events(*ENDS) == ["Stopped", "Freed"]


async def test_bytes_stay_taken_while_anything_of_the_tree_lives(make_lab):
    """Processes that were left behind are ended first; only then is the memory called free."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    child.left = [[7001, 7002], [7002], [7002]]
    await lab.desk.unload("a")
    assert child.left == []
    assert child.kills == 2
    assert lab.events(*ENDS) == ["BecameReady", "Stopped", "Freed"]


@pytest.mark.parametrize("broken", ["stop", "pids", "kill"])
async def test_a_fault_while_a_worker_is_ended_does_not_hold_up_the_pool(make_lab, monkeypatch, caplog, broken):
    """Bytes that are never called free would keep every later load out."""
    lab = make_lab(budget=150 * MIB, a={}, b={})
    child = await lab.resident("a")

    async def fail(*_):
        raise OSError("out of everything")

    child.left = [[7001]] if broken == "kill" else []
    monkeypatch.setattr(child, broken, fail)
    await lab.desk.unload("a")
    monkeypatch.undo()
    for record in caplog.records:
        record.expected = True
    assert "out of everything" in caplog.text
    assert lab.events(*ENDS) == ["BecameReady", "Stopped", "Freed"]


async def test_a_worker_that_is_lost_sight_of_counts_as_ended(make_lab, monkeypatch, caplog):
    """A fault of the watch must not leave a model that looks resident for ever."""
    lab = make_lab(a={})
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()

    async def fail():
        raise OSError("no such process")

    monkeypatch.setattr(lab.child("a"), "exited", fail)
    lab.child("a").become_ready()
    await lab.settle()
    for record in caplog.records:
        record.expected = True
    assert lab.events(*ENDS) == ["LoadBroke", "Freed"]
    assert "lost sight of" in lab.model("a").error.message


async def test_a_start_that_fails_unexpectedly_is_a_failed_load(make_lab, caplog):
    """The daemon outlives every fault of a start, and the model backs off."""
    lab = make_lab(a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.child("a").fail(ZeroDivisionError("odd"))
    with pytest.raises(LoadFailed, match="odd"):
        await acquiring
    await lab.settle()
    for record in caplog.records:
        record.expected = True
    assert lab.events(*ENDS) == ["LoadBroke", "Freed"]


async def test_a_request_of_a_killed_worker_is_told_why_it_was_killed(make_lab):
    """The one that took more than its allowance is named as such, not as a broken connection (rule 10)."""
    lab = make_lab(budget=200 * MIB, a={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.child("a").become_ready(50 * MIB)
    lease = await acquiring
    lab.ram[lab.child("a").pid] = 300 * MIB
    await lab.meter.sample()
    error = await lab.desk.why_gone(lease)
    assert "it reached 300 MiB of ram, it was granted 100 MiB" in error.message
    lab.desk.release(lease, 502, 0.1)
    await lab.settle()
    assert lab.child("a").graces == []
    assert lab.child("a").kills >= 1


async def test_a_broken_connection_is_explained_also_after_the_memory_is_back(make_lab):
    """The client of a slow stream may learn of the death when the model is already loaded again."""
    lab = make_lab(a={"parallel": 1}, b={})
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.child("a").become_ready()
    lease = await acquiring
    lab.child("a").die()
    await lab.settle()
    assert lab.model("a").state is State.FAILED
    assert "SIGSEGV" in (await lab.desk.why_gone(lease)).message
    await lab.resident("a")
    assert "SIGSEGV" in (await lab.desk.why_gone(lease)).message
    lab.desk.release(lease, 502, 0.1)


async def test_a_worker_that_lives_on_is_not_blamed_with_an_end(make_lab):
    """It closed one connection; asking about that leaves nothing behind."""
    lab = make_lab(a={})
    await lab.resident("a")
    endpoint = lab.fleet.ready("a").endpoint
    before = asyncio.all_tasks()
    for _ in range(20):
        assert await lab.fleet.why_ended("a", endpoint, 0.0) is None
    assert asyncio.all_tasks() == before
    assert await lab.fleet.why_ended("a", Endpoint(socket="/run/other.sock"), 0.0) is None


async def test_what_a_dead_worker_said_is_not_its_state(make_lab):
    """Between death and freed memory there is no process and no endpoint; what it offered stays known."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    assert lab.fleet.pid("a") == child.pid
    child.left = [[7001]] * 1000
    child.die()
    await lab.settle()
    assert lab.model("a").state is State.RELEASING
    assert (lab.fleet.pid("a"), lab.fleet.ready("a")) == (None, None)
    assert lab.desk.capabilities("a") == {Capability.CHAT}
    child.left = []


async def test_a_stop_of_everything_ends_loads_stops_and_the_living(make_lab):
    """One worker loads, one serves, one is being stopped, one has died: all are gone afterwards, each ended once."""
    lab = make_lab(**{name: {} for name in "abcd"})
    for name in "bcd":
        await lab.resident(name)
    lab.inbox.post(ev.LoadWanted("a"))
    lab.child("c").stubborn = True
    lab.inbox.post(ev.UnloadWanted("c"))
    lab.child("d").die()
    await lab.settle()
    ending = asyncio.ensure_future(lab.fleet.stop_all(5.0))
    await lab.settle()
    assert not ending.done()
    lab.child("c").end(None)
    await ending
    assert all(child.ended for child in lab.children)


async def test_a_second_order_to_end_a_load_still_waits_for_its_process(make_lab):
    """A stop in progress and the end of the daemon meet: nobody says that all is gone while a tree is being killed."""
    lab = make_lab(a={})
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()
    child = lab.child("a")
    child.immortal = True
    lab.inbox.post(ev.UnloadWanted("a"))
    await lab.settle()
    ending = asyncio.ensure_future(lab.fleet.stop_all(5.0))
    await lab.settle()
    assert not ending.done()
    child.end(None)
    await ending


async def test_those_that_use_their_grace_can_be_killed_after_all(make_lab):
    """The second signal does not wait for what the first one allowed."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    child.stubborn = True
    ending = asyncio.ensure_future(lab.fleet.stop_all(60.0))
    await lab.settle()
    assert (child.graces, child.kills) == ([60.0], 0)
    await lab.fleet.kill_all()
    await ending
    assert child.kills == 1


async def test_the_next_spare_worker_is_started_when_a_load_is_over(make_lab):
    """Not while it loads, from which it would take time; also after one that failed; at the end it is closed first."""
    lab = make_lab(a={})
    for ends in (lambda child: child.become_ready(), lambda child: child.fail(LoadFailed("broke"))):
        lab.spare.acts.clear()
        lab.inbox.post(ev.LoadWanted("a"))
        await lab.settle()
        assert lab.spare.acts == ["take"]
        ends(lab.child("a"))
        await lab.settle()
        assert lab.spare.acts == ["take", "refill"]
        await lab.desk.unload("a")
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()
    lab.spare.acts.clear()
    await lab.fleet.stop_all(1.0)
    assert lab.spare.acts == ["close", "refill"]


async def test_a_task_that_fails_is_said_so(make_lab, caplog):
    """No fault of the fleet is silent."""
    lab = make_lab(a={})

    async def fail():
        raise RuntimeError("odd")

    lab.fleet._crew.spawn(fail())
    await lab.settle()
    assert "a task of the fleet failed" in [r.message for r in caplog.records if r.levelno == logging.ERROR]
    for record in caplog.records:
        record.expected = True


async def test_a_worker_that_the_kernel_refused_a_group_is_watched(make_lab, monkeypatch):
    """Where others have cgroups, one without is ended when it was measured beyond its limit."""
    lab = make_lab(budget=2000 * MIB, a={}, b={})
    monkeypatch.setattr(type(lab.limiter), "hard", True)
    child, other = await lab.resident("a"), await lab.resident("b")
    lab.ram[child.pid] = 165 * MIB  # granted 100, the margin is 64
    await lab.meter.sample()
    await lab.meter.sample()
    await lab.settle()
    assert child.ended
    assert not other.ended
    assert "since the kernel refused it a cgroup" in lab.model("a").last_reason
    assert lab.model("a").need["ram"] >= 198 * MIB
