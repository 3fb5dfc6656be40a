"""A daemon's life from start to stop, in this process: real door, real signals, fake workers."""

import asyncio
import contextlib
import json
import os
import signal
from dataclasses import replace

import aiohttp
import pytest

from pagein.daemon.house import House
from pagein.daemon.run import Daemon
from pagein.daemon.states import limits, model_state
from pagein.errors import PageinError, ShuttingDown
from pagein.protocol import Capability
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.supervisor.limits import NoGroups
from pagein.supervisor.registry import Registry

from .lab import MIB, Lab


class Life:
    """One daemon that runs as a task."""

    def __init__(self, lab, house):
        self.lab, self.house = lab, house
        self.registry = Registry.open(house.state_dir)
        limiter = NoGroups("the watchdog, in this test")
        self.daemon = Daemon(lab.settings, house, lab.budgets, lab.entries, lab.peaks, limiter, self.registry)
        self.state = self.daemon.inbox.scheduler.state
        self.events = []
        self.daemon.inbox.add_listener(self)
        self.running = asyncio.ensure_future(self.daemon.run())

    def on_step(self, event, actions):
        self.events.append(event)

    async def until(self, condition):
        """Let the loop run until something holds; a bound, not a pace."""
        async with asyncio.timeout(30):
            while not condition():
                assert not self.running.done() or condition(), self.running
                await asyncio.sleep(0)

    async def open(self):
        await self.until((self.house.state_dir / "daemon.json").exists)
        return self

    def signal(self):
        os.kill(os.getpid(), signal.SIGTERM)

    async def resident(self, name):
        loading = asyncio.ensure_future(self.daemon.desk.load(name))
        await self.until(lambda: any(child.name == name for child in self.lab.children))
        self.lab.child(name).become_ready(50 * MIB)
        await loading
        return self.lab.child(name)


@pytest.fixture
async def start(tmp_path, monkeypatch, bounded):
    """Start a daemon; it must have ended when the test ends, and leave no task."""
    lives = []
    with contextlib.ExitStack() as houses:

        def make(**models):
            lab = Lab(tmp_path / "state", **models).patch(monkeypatch)
            lives.append(Life(lab, houses.enter_context(House(tmp_path / "state"))))
            return lives[-1]

        (tmp_path / "state").mkdir()
        yield make
        for life in lives:
            life.daemon._on_signal(signal.SIGTERM)
            life.daemon._on_signal(signal.SIGTERM)
            with contextlib.suppress(PageinError):
                await life.running
            life.registry.close()
            life.lab.peaks.close()


async def test_a_signal_ends_everything(start):
    """Exit code 0, every worker ended with its grace, its peak remembered and its unload logged, the door closed."""
    life = await start(a={}).open()
    child = await life.resident("a")
    address = json.loads((life.house.state_dir / "daemon.json").read_text())["address"]
    async with aiohttp.ClientSession() as client:
        assert (await (await client.get(f"{address}/health")).json())["status"] == "ok"
    life.signal()
    assert await life.running == 0
    assert (child.graces, child.ended) == ([5.0], True)
    assert life.lab.peaks.peak("key of a").used == {"ram": 50 * MIB}
    log = (life.house.state_dir / "logs" / "a.log").read_text()
    assert f'before.ram={50 * MIB} after.ram=0 why="the daemon stops"' in log
    async with aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientConnectionError):
            await client.get(f"{address}/health")


async def test_nothing_is_loaded_before_it_is_known_what_the_machine_has(start):
    """The first sample comes before the door opens and before high-priority models are wanted (rule 2)."""
    life = start(h={"priority": "high"})
    life.lab.available = 50 * MIB
    life.daemon._meter.run = asyncio.Event().wait  # the samples that come later come too late
    await life.open()
    await life.until(lambda: life.state.models["h"].wanted_since is not None)
    first = [type(event) for event in life.events].index(ev.LoadWanted)
    assert any(isinstance(event, ev.Measured) and event.available for event in life.events[:first])
    assert life.lab.children == []
    assert "50.0 MiB of 64.0 GiB available" in life.state.models["h"].last_reason


async def test_high_priority_is_loaded_at_start(start):
    """But not what cannot be served at all."""
    life = start(h={"priority": "high"}, broken={"priority": "high"}, m={})
    life.state.models["broken"].problem = "its file is missing"
    await life.open()
    await life.until(lambda: life.lab.children)
    assert [child.name for child in life.lab.children] == ["h"]
    life.lab.child("h").become_ready()
    await life.until(lambda: life.state.models["h"].state is State.RESIDENT)


async def test_what_is_being_answered_may_finish(start):
    """A signal refuses what waits and what comes, and lets a lease end."""
    life = await start(a={}).open()
    child = await life.resident("a")
    lease = await life.daemon.desk.acquire("a", Capability.CHAT)
    life.signal()
    await life.until(lambda: life.state.stopping)
    with pytest.raises(ShuttingDown):
        await life.daemon.desk.acquire("a", Capability.CHAT)
    assert child.graces == []
    life.daemon.desk.release(lease, 200, 0.1)
    assert await life.running == 0
    assert child.graces == [5.0]


async def test_a_second_signal_does_not_wait_for_answers(start):
    """Workers are killed at once."""
    life = await start(a={}).open()
    child = await life.resident("a")
    lease = await life.daemon.desk.acquire("a", Capability.CHAT)
    life.signal()
    await life.until(lambda: life.state.stopping)
    life.signal()
    assert await life.running == 0
    assert child.graces == []
    assert child.kills >= 1
    assert "the daemon stops" in (await life.daemon.desk.why_gone(lease)).message


async def test_a_second_signal_ends_the_grace_of_workers(start):
    """Also when it comes after the answers, while a worker takes its time."""
    life = await start(a={}).open()
    child = await life.resident("a")
    child.stubborn = True
    life.signal()
    await life.until(lambda: child.graces)
    assert child.kills == 0
    life.signal()
    assert await life.running == 0
    assert child.kills == 1


async def test_a_second_signal_does_not_wait_for_slow_clients(start):
    """A client that does not read its answer holds the door open only until then."""
    life = start(a={})
    gate = asyncio.Event()

    async def cleanup():
        gate.set()
        await asyncio.Event().wait()

    await life.open()
    life.signal()
    closing = asyncio.create_task(life.daemon._close_door(type("Runner", (), {"cleanup": staticmethod(cleanup)})()))
    await gate.wait()
    life.signal()
    await closing
    await life.running


async def test_a_load_in_progress_does_not_hold_up_the_end(start):
    """It is ended with its process; the operator who waited for it is told."""
    life = await start(a={}).open()
    loading = asyncio.ensure_future(life.daemon.desk.load("a"))
    await life.until(lambda: life.lab.children)
    life.signal()
    with pytest.raises(ShuttingDown):
        await loading
    assert await life.running == 0
    assert life.lab.child("a").kills == 1


async def test_a_door_that_cannot_be_opened_leaves_nothing_running(start):
    """The port is taken: the error says so and what to do, and there is no worker and no task left."""
    taken = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = taken.sockets[0].getsockname()[1]
    life = start(h={"priority": "high"})
    life.daemon._settings = life.lab.settings.model_copy(
        update={"server": life.lab.settings.server.model_copy(update={"port": port})}
    )
    with pytest.raises(PageinError, match=f"cannot listen at 127.0.0.1:{port}: address already in use") as refused:
        await life.running
    assert "--port" in (refused.value.hint or "")
    assert life.lab.children == []
    taken.close()


async def test_a_model_that_cannot_be_served_is_named_at_the_start(start, caplog):
    """Who misspelt something learns it from the log, not from the first request."""
    life = start(a={}, b={})
    entry = replace(life.lab.entries["b"], problem="there is no option 'x'")
    life.daemon._roster.entries["b"] = entry
    caplog.set_level("WARNING", "pagein.reload")
    await life.open()
    await life.until(lambda: caplog.messages)
    assert caplog.messages == ["model 'b' cannot be served: there is no option 'x'"]


async def test_the_configuration_reaches_the_scheduler(start):
    """Every bound and every setting of a model that it decides by."""
    life = start(a={"priority": "low", "parallel": 3, "queue": 7, "keep_alive": 9, "pin": True})
    settings = life.lab.settings
    life.lab.peaks.remember("key of a", "a", {"ram": 5}, 2.5)
    state = model_state(settings, life.lab.entries["a"], life.lab.peaks)
    assert (state.priority, state.parallel, state.queue_limit, state.keep_alive) == ("low", 3, 7, 9.0)
    assert (state.pinned, state.load_seconds, state.need) == (True, 2.5, {"ram": 100 * MIB})
    wanted, supervisor = settings.scheduler, settings.supervisor
    bounds = limits(settings, frozenset())
    assert (bounds.low_linger, bounds.max_wait, bounds.patience) == (
        wanted.low_linger,
        wanted.max_wait,
        wanted.patience,
    )
    assert (bounds.backoff_first, bounds.backoff_max) == (supervisor.backoff_first, supervisor.backoff_max)
