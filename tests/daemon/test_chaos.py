"""Inbox, scheduler, fleet, meter and desk together, with workers that fail at any moment: what must hold then."""

from __future__ import annotations

import asyncio
import random

import pytest

from pagein.errors import LoadFailed, PageinError
from pagein.gateway.ports import Lease
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev

from .lab import MIB, FakeChild, Lab

MODELS = {
    "small": {"need": 60 * MIB, "parallel": 3, "queue": 5},
    "big": {"need": 240 * MIB, "parallel": 1, "queue": 3},
    "low": {"need": 100 * MIB, "priority": "low"},
    "high": {"need": 50 * MIB, "priority": "high"},
    "brief": {"need": 120 * MIB, "keep_alive": 5},
    "huge": {"need": 900 * MIB},
}


class Chaos:
    """Clients, operators and workers that do anything at any time."""

    def __init__(self, lab: Lab, seed: int) -> None:
        self.lab, self.dice = lab, random.Random(seed)
        self.requests: list[asyncio.Task[Lease]] = []
        self.operators: list[asyncio.Task[None]] = []
        self.held: list[Lease] = []
        self.released = 0

    async def step(self) -> None:
        """One thing happens, and then the loop turns a few times, or not at all."""
        acts = [
            *[self.request] * 6,
            *[self.release] * 5,
            *[self.load_ends] * 6,
            *[self.time_passes] * 3,
            *[self.sample] * 3,
            self.cancel,
            self.operate,
            self.operator_leaves,
            self.worker_dies,
            self.worker_is_hard_to_end,
            self.worker_ends_at_last,
            self.machine_changes,
        ]
        await self.dice.choice(acts)()
        for _ in range(self.dice.choice([0, 0, 1, 2, 3, 20])):
            await asyncio.sleep(0)
        self.collect()
        watched, known = set(self.lab.meter._watched), set(self.lab.fleet._crew.workers)
        assert watched <= known, "a process is measured that nobody owns"

    def collect(self) -> None:
        """Take the leases that were granted; a request ends once, with a lease or an error."""
        for task in [task for task in self.requests if task.done()]:
            self.requests.remove(task)
            if not task.cancelled() and task.exception() is None:
                self.held.append(task.result())
            elif not task.cancelled():
                assert isinstance(task.exception(), PageinError), task.exception()
        for task in [task for task in self.operators if task.done()]:
            self.operators.remove(task)
            assert task.cancelled() or isinstance(task.exception(), PageinError | None), task.exception()

    def living(self) -> list[FakeChild]:
        return [child for child in self.lab.children if not child.ended]

    async def request(self) -> None:
        self.requests.append(self.lab.acquire(self.dice.choice(list(MODELS))))

    async def cancel(self) -> None:
        if self.requests:
            self.dice.choice(self.requests).cancel()

    async def release(self) -> None:
        if self.held:
            lease = self.held.pop(self.dice.randrange(len(self.held)))
            if self.dice.random() < 0.2:
                await self.lab.desk.why_gone(lease)
            self.lab.desk.release(lease, self.dice.choice([200, 200, 499, 502]), 0.1)
            self.released += 1

    async def operate(self) -> None:
        desk, name = self.lab.desk, self.dice.choice(list(MODELS))
        match self.dice.randrange(4):
            case 0:
                self.operators.append(asyncio.ensure_future(desk.load(name)))
            case 1:
                self.operators.append(asyncio.ensure_future(desk.unload(name)))
            case _:
                desk.set_pin(name, self.dice.random() < 0.3)

    async def operator_leaves(self) -> None:
        if self.operators:
            self.dice.choice(self.operators).cancel()

    async def load_ends(self) -> None:
        starting = [child for child in self.living() if not child.becoming.done()]
        if not starting:
            return
        child = self.dice.choice(starting)
        match self.dice.randrange(8):
            case 0:
                child.fail(LoadFailed(f"{child.name} broke"))
            case 1:
                child.become_ready()
                child.die()
            case 2:
                child.become_ready(400 * MIB)
            case _:
                child.become_ready(self.dice.randrange(10, 60) * MIB)

    async def worker_dies(self) -> None:
        ready = [child for child in self.living() if child.becoming.done()]
        if ready:
            child = self.dice.choice(ready)
            child.left = [[child.pid + 10_000]] * self.dice.choice([0, 0, 3])
            child.die()

    async def worker_is_hard_to_end(self) -> None:
        for child in self.living()[:2]:
            child.stubborn, child.immortal = True, self.dice.random() < 0.5
            child.left = [[child.pid + 10_000]] * self.dice.choice([0, 2])

    async def worker_ends_at_last(self) -> None:
        for child in self.living():
            child.stubborn = child.immortal = False
            if child.asked:
                child.end(None)

    async def time_passes(self) -> None:
        self.lab.now += self.dice.choice([0.1, 1.0, 10.0, 40.0])
        self.lab.inbox.post(ev.Ticked())

    async def sample(self) -> None:
        for child in self.living():
            if child.pid in self.lab.ram and self.dice.random() < 0.1:
                self.lab.ram[child.pid] += self.dice.randrange(80) * MIB
        self.lab.own = self.dice.choice([None, 10 * MIB, 40 * MIB])
        await self.lab.meter.sample()

    async def machine_changes(self) -> None:
        self.lab.available = self.dice.choice([None, None, 50 * MIB, 300 * MIB])

    async def calm_down(self) -> None:
        """From here on everybody behaves, and nothing new is asked for."""
        self.lab.available, self.lab.own = None, 10 * MIB
        for _ in range(400):
            await self.worker_ends_at_last()
            for child in self.living():
                if not child.becoming.done():
                    child.become_ready()
            while self.held:
                await self.release()
            await self.lab.meter.sample()
            self.lab.now += 1.0
            self.lab.inbox.post(ev.Ticked())
            await self.lab.settle()
            self.collect()
            if not (self.requests or self.operators or self.held):
                return
        raise AssertionError(f"it never ends: {self.requests} {self.operators}")


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_fails_every_request_ends_once_and_nothing_is_left(make_lab, caplog, seed):
    """No waiter without an end, no lease that stays, no process, task, watch or byte that nobody owns."""
    lab = make_lab(budget=400 * MIB, **MODELS)
    await lab.meter.sample()
    chaos = Chaos(lab, seed)
    lab.inbox.post(ev.LoadWanted("high"))
    for _ in range(300):
        await chaos.step()
    await chaos.calm_down()
    assert lab.state.model_of == {}
    assert len(lab.state.leases) == 0
    assert (lab.desk._tickets, lab.desk._loads, lab.desk._unloads) == ({}, {}, {})
    for name in MODELS:
        lab.desk.set_pin(name, False)
        await lab.desk.unload(name)
        assert lab.model(name).state in (State.ABSENT, State.FAILED)
    assert chaos.living() == []
    assert (lab.ram, lab.meter._watched, lab.fleet._crew.workers) == ({}, {}, {})
    assert lab.state.ledgers["ram"].held == lab.state.own_least
    await lab.settle()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert chaos.released > 0
    assert not [record for record in caplog.records if record.exc_info], "a listener or a task failed"


async def test_a_thousand_cycles_leave_nothing_behind(make_lab):
    """Memory of the daemon's own books is bounded: nothing grows with the number of loads and requests."""

    def sizes():
        return {
            "tasks": len(lab.fleet._crew.tasks),
            "gone": len(lab.fleet._crew.gone),
            "workers": len(lab.fleet._crew.workers),
            "watched": len(lab.meter._watched),
            "tickets": len(lab.desk._tickets),
            "requests": len(lab.state.model_of),
            "loads": len(lab.desk._loads) + len(lab.desk._unloads),
            "subscribers": len(lab.journal._subscribers),
        }

    lab = make_lab(budget=150 * MIB, a={}, b={})
    seen = []
    for number in range(1000):
        name = "ab"[number % 2]
        acquiring = lab.acquire(name)
        while not lab.loads(name) or lab.child(name).ended or lab.child(name).becoming.done():
            await asyncio.sleep(0)
        lab.child(name).become_ready(100 * MIB)
        lab.desk.release(await acquiring, 200, 0.1)
        lab.children = lab.children[-2:]
        lab.log.clear()
        await lab.settle()
        seen.append(sizes())
    assert seen[-1] == seen[9]
