"""The state as it is shown, and the dry run beside what then happens."""

import os

import pytest

from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.actions import Load, Stop

from .lab import MIB


def shown(lab, name):
    return next(m for m in lab.desk.status().models if m.name == name)


async def test_a_pool_shows_ledger_and_measurement(make_lab):
    """Own, reserved, resident, releasing and free add up to the budget; the measured sum stands beside them."""
    lab = make_lab(a={"need": 100 * MIB}, b={"need": 200 * MIB}, c={"need": 50 * MIB})
    await lab.resident("a", 90 * MIB)
    leaving = await lab.resident("c", 40 * MIB)
    leaving.stubborn = True
    lab.inbox.post(ev.UnloadWanted("c"))
    lab.inbox.post(ev.LoadWanted("b"))
    await lab.settle()
    lab.available = 5000 * MIB
    await lab.meter.sample()
    (pool,) = lab.desk.status().pools
    assert (pool.own, pool.reserved, pool.resident, pool.releasing) == (10 * MIB, 200 * MIB, 100 * MIB, 50 * MIB)
    assert pool.own + pool.reserved + pool.resident + pool.releasing + pool.free == pool.budget
    assert (pool.measured, pool.highest_measured, pool.available) == (140 * MIB, 140 * MIB, 5000 * MIB)
    lab.own = None
    await lab.meter.sample()
    assert lab.desk.status().pools[0].measured is None, "unknown is not 0"
    leaving.end(None)


async def test_the_numbers_behind_a_need_are_those_that_made_it(make_lab):
    """Once another need was learned than the catalog's, it is the measurement that explains it, or the outgrown one."""
    lab = make_lab(a={"need": 500 * MIB}, liar={"need": 50 * MIB})
    was = lab.entries["a"].need.explanation
    assert shown(lab, "a").need_explanation == was
    await lab.resident("a", 100 * MIB)
    lab.desk.release(await lab.acquire("a"), 200, 0.1)
    await lab.meter.sample()
    told = shown(lab, "a")
    assert (told.need, told.need_source) == ({"ram": 108 * MIB}, "measured")
    assert told.need_explanation == "highest of what was measured: 100 MiB ram, + 5 % and at least 8.0 MiB"
    lab.model("liar").need, lab.model("liar").need_source = {"ram": 80 * MIB}, "outgrown"
    assert shown(lab, "liar").need_explanation.startswith("it outgrew what it was granted, which was declared: ")


async def test_a_model_shows_its_life(make_lab):
    """State, bytes, leases, process and last reason; what is unknown is None."""
    lab = make_lab(a={"pin": True, "context": 512})
    cold = shown(lab, "a")
    assert (cold.state, cold.pid, cold.measured, cold.peak, cold.idle_seconds) == ("absent", None, None, None, None)
    assert (cold.pinned, cold.need_source, cold.capabilities) == (True, "declared", ["chat"])
    child = await lab.resident("a", 90 * MIB)
    lab.now += 2.0
    warm = shown(lab, "a")
    assert (warm.state, warm.pid, warm.idle_seconds, warm.loads) == ("resident", child.pid, 2.0, 1)
    assert (warm.held, warm.measured, warm.peak) == ({"ram": 100 * MIB}, {"ram": 90 * MIB}, {"ram": 90 * MIB})
    assert warm.engine_version == "1.0"
    lease = await lab.acquire("a")
    busy = shown(lab, "a")
    assert (busy.leases, busy.uses, busy.idle_seconds) == (1, 0, None)
    lab.desk.release(lease, 200, 0.1)
    child.die()
    await lab.settle()
    dead = shown(lab, "a")
    assert (dead.state, dead.pid, dead.retry_in_seconds) == ("failed", None, 1.0)
    assert "SIGSEGV" in dead.problem
    lab.now += 5.0
    assert shown(lab, "a").retry_in_seconds is None


async def test_the_daemon_shows_itself(make_lab):
    """Process, uptime, and that it is stopping."""
    lab = make_lab(a={})
    lab.now += 7.0
    status = lab.desk.status()
    assert (status.pid, status.uptime_seconds, status.state) == (os.getpid(), 7.0, "running")
    lab.inbox.post(ev.ShutdownWanted())
    assert lab.desk.status().state == "stopping"


async def test_the_plan_is_what_then_happens(make_lab):
    """Load, evict, wait, resident, loading and refuse: asked first, then done."""
    lab = make_lab(budget=260 * MIB, a={}, b={}, c={}, huge={"need": 500 * MIB})
    assert lab.desk.plan("a").outcome == "load"
    assert lab.desk.plan("a").free == {"ram": 260 * MIB}
    acquiring = lab.acquire("a")
    await lab.settle()
    assert lab.desk.plan("a").outcome == "loading"
    lab.child("a").become_ready()
    lease = await acquiring
    assert lab.desk.plan("a").outcome == "resident"
    await lab.resident("b")
    plan = lab.desk.plan("c")
    assert (plan.outcome, [e.model for e in plan.evict]) == ("evict", ["b"])
    assert plan.evict[0].bytes == {"ram": 100 * MIB}
    assert "idle for" in plan.evict[0].reason
    refused = lab.desk.plan("huge")
    assert refused.outcome == "refuse"
    assert "needs 500 MiB of ram" in refused.reason
    assert lab.events(Stop, Load) == []
    waiting = lab.acquire("c")
    await lab.settle()
    assert [a.model for _, actions in lab.log for a in actions if isinstance(a, Stop)] == ["b"]
    lab.child("c").become_ready()
    other = await waiting
    plan = lab.desk.plan("b")
    assert (plan.outcome, plan.evict) == ("wait", [])
    assert "in use" in plan.reason
    for held in (lease, other):
        lab.desk.release(held, 200, 0.1)


async def test_the_plan_knows_back_off_queue_and_those_who_came_before(make_lab):
    """What a request would be refused for, or held up by, is in the answer."""
    lab = make_lab(budget=260 * MIB, a={"queue": 0, "parallel": 1}, b={"need": 200 * MIB}, c={}, d={})
    child = await lab.resident("d")
    child.die()
    await lab.settle()
    plan = lab.desk.plan("d")
    assert plan.outcome == "refuse"
    assert "next try in" in plan.reason
    acquiring = lab.acquire("a")
    await lab.settle()
    lab.child("a").become_ready()
    lease = await acquiring
    assert lab.desk.plan("a").outcome == "refuse"
    assert "queue of model 'a' is full" in lab.desk.plan("a").reason
    waiting = lab.acquire("b")
    await lab.settle()
    plan = lab.desk.plan("c")
    assert plan.outcome == "wait"
    assert "b was asked for before" in plan.reason
    assert lab.desk.plan("b").outcome == "wait"
    waiting.cancel()
    lab.desk.release(lease, 200, 0.1)
    await lab.settle()
    lab.inbox.post(ev.ShutdownWanted())
    assert (lab.desk.plan("c").outcome, lab.desk.plan("c").reason) == ("refuse", "the daemon is stopping")


async def test_the_plan_of_what_is_leaving(make_lab):
    """It would be loaded again once it is gone."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    child.stubborn = True
    lab.inbox.post(ev.UnloadWanted("a"))
    await lab.settle()
    assert lab.model("a").state is State.DRAINING
    assert (lab.desk.plan("a").outcome, lab.desk.plan("a").reason) == ("wait", "a is leaving and will be loaded again")
    child.end(None)
    with pytest.raises(Exception, match="no model 'z'"):
        lab.desk.plan("z")


async def test_decisions_can_be_asked_for_by_model(make_lab):
    """`pagein explain` reads the journal; a model that is not configured is an error."""
    lab = make_lab(a={}, b={})
    await lab.resident("a")
    kinds = [decision.kind for decision in lab.desk.decisions("a")]
    assert kinds[:2] == ["load", "ready"]
    assert lab.desk.decisions("b") == []
    assert len(lab.desk.decisions(limit=1)) == 1
    assert lab.desk.log_path("a").endswith("logs/a.log")
    with pytest.raises(Exception, match="no model 'z'"):
        lab.desk.decisions("z")
