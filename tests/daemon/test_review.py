"""What happens between two await points of the daemon: stops, edits, deaths and cancellations that cross each other."""

import asyncio
import dataclasses
import os
from types import SimpleNamespace

import pytest

from pagein.daemon import fleet, meter, sleeper, states
from pagein.daemon.run import Daemon
from pagein.errors import ModelNotFound, NoRoom
from pagein.memory.budget import PoolBudget
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.protocol import Capability, Endpoint, Ready
from pagein.residency.lifecycle import State
from pagein.scheduler import events as ev
from pagein.scheduler.state import left_of

from .lab import MIB, Lab

ENDS = (ev.BecameReady, ev.LoadBroke, ev.Stopped, ev.WorkerExited, ev.Freed, ev.Slept, ev.SleepBroke)


def edit(lab, name, **changes):
    """Put an edited model in its place, as `Reloader` does."""
    entry = dataclasses.replace(lab.entries[name], **changes)
    lab.roster.expect(lab.settings, {name: entry})
    lab.inbox.post(ev.Reconfigured({name: states.model_state(lab.settings, entry, lab.peaks)}))


def remove(lab, name):
    lab.inbox.post(ev.Reconfigured(removed=frozenset({name})))


def stays(child, *pids):
    """These processes of an ended worker live on, until the returned list is cleared."""
    left = list(pids)

    async def look():
        return list(left)

    child.pids = look
    return left


async def stopped(lab, name):
    """A worker was told to leave, and the wait for its memory is over."""
    lab.inbox.post(ev.UnloadWanted(name))
    await lab.settle()
    lab.now += 100.0
    await lab.settle()


def forgive(caplog, text):
    assert text in caplog.text
    for record in caplog.records:
        record.expected = True


# ── edits ───────────────────────────────────────────────────────────────────────────────────────


async def test_an_edited_model_offers_what_it_is_now_and_not_what_its_last_worker_said(make_lab):
    """Else a model that became another one could never be asked for what it offers now."""
    lab = make_lab(a={})
    await lab.resident("a")
    edit(lab, "a", capabilities=frozenset({Capability.TRANSCRIPTION}))
    await lab.settle()
    assert lab.desk.capabilities("a") == {Capability.TRANSCRIPTION}


async def test_a_load_of_a_model_that_goes_for_good_is_answered(make_lab):
    """It was removed while it served; when it is gone the operator is told, and every other one still is."""
    lab = make_lab(a={}, b={})
    await lab.resident("a")
    await lab.acquire("a")
    remove(lab, "a")
    loading = asyncio.ensure_future(lab.desk.load("a"))
    await lab.settle()
    other = asyncio.ensure_future(lab.desk.load("b"))
    await lab.settle()
    lab.child("a").die()
    await lab.settle()
    assert "a" not in lab.state.models
    with pytest.raises(ModelNotFound):
        await asyncio.wait_for(loading, 5)
    lab.child("b").become_ready()
    await asyncio.wait_for(other, 5)


async def test_a_model_that_is_gone_for_good_holds_no_open_file(make_lab):
    """Edits that come and go for months must not use up the daemon's descriptors."""
    lab = make_lab(a={}, b={})
    before = len(os.listdir("/proc/self/fd"))
    await lab.resident("a")
    remove(lab, "a")
    await lab.settle()
    assert "a" not in lab.state.models
    assert len(os.listdir("/proc/self/fd")) == before


async def test_logs_stay_in_the_state_folder_of_the_start(make_lab, tmp_path):
    """`state_dir` takes effect at the next start only."""
    lab = make_lab(a={})
    before = lab.fleet.log_path("a")
    lab.roster.expect(lab.settings.model_copy(update={"state_dir": tmp_path / "elsewhere"}), {})
    assert lab.fleet.log_path("a") == before


async def test_an_unexpected_fault_of_a_reload_is_said_and_ends_nothing(caplog):
    """The watch of the file goes on, and systemd does not wait for the end of the reload for ever."""
    told = []

    class Broken:
        async def reload(self):
            raise OSError("the disk is gone")

    daemon = Daemon.__new__(Daemon)
    daemon._reloader = Broken()
    daemon._manager = SimpleNamespace(reloading=lambda: None, ready=told.append)
    await daemon._reload()
    assert "the disk is gone" in told[0]
    assert "a reload failed" in caplog.text


async def test_a_shutdown_gives_the_grace_that_is_configured_now(make_lab):
    """An edit of `supervisor.grace` counts for the end too."""
    lab = make_lab(a={})
    supervisor = lab.settings.supervisor.model_copy(update={"grace": 77.0})
    fresh = lab.settings.model_copy(update={"supervisor": supervisor})
    daemon = Daemon.__new__(Daemon)
    daemon._settings, daemon._roster = lab.settings, lab.roster
    lab.roster.expect(fresh, {})
    assert daemon._grace == 77.0


# ── what ended workers leave ────────────────────────────────────────────────────────────────────


async def test_what_two_workers_of_one_model_left_is_charged_together(make_lab):
    """The second one's rest does not replace the first one's, nor does the end of one free the other's."""
    lab = make_lab(a={})
    first = stays(await lab.resident("a"), 7)
    await stopped(lab, "a")
    assert lab.state.ledgers["ram"].bytes_of(left_of("a")) == 10 * MIB
    second = stays(await lab.resident("a"), 8, 9)
    await stopped(lab, "a")
    assert lab.state.ledgers["ram"].bytes_of(left_of("a")) == 30 * MIB
    first.clear()
    await lab.settle()
    assert lab.state.ledgers["ram"].bytes_of(left_of("a")) == 20 * MIB
    second.clear()
    await lab.settle()
    assert lab.state.ledgers["ram"].bytes_of(left_of("a")) == 0


async def test_a_fault_while_what_is_left_is_followed_does_not_charge_it_for_ever(make_lab, caplog):
    """The next look counts."""
    lab = make_lab(a={})
    child = await lab.resident("a")
    stays(child, 7)
    await stopped(lab, "a")

    async def fail():
        raise OSError("out of everything")

    child.pids = fail
    await lab.settle()
    stays(child)
    await lab.settle()
    assert lab.state.ledgers["ram"].bytes_of(left_of("a")) == 0
    forgive(caplog, "out of everything")


async def test_memory_of_a_card_that_came_back_before_the_end_was_told_is_not_missed(make_lab, monkeypatch):
    """A sample between the end of a process and the news of it sees the card free already."""
    lab = make_lab(a={"need": {"ram": 10 * MIB, "cuda:0": 100 * MIB}})
    free = 1000 * MIB

    def read():
        ram = PoolReading("ram", 64 * 1024 * MIB, None, "physical memory")
        return MachineSnapshot({"ram": ram, "cuda:0": PoolReading("cuda:0", 2000 * MIB, free, "the card")})

    monkeypatch.setattr(meter, "read_machine", read)
    lab.inbox.post(ev.Reconfigured(budgets={"cuda:0": 1000 * MIB}))
    lab.budgets["cuda:0"] = PoolBudget("cuda:0", 1000 * MIB, "configured")
    await lab.meter.sample()
    loading = asyncio.ensure_future(lab.desk.load("a"))
    await lab.settle()
    child = lab.child("a")
    lab.gpu[child.pid] = {"cuda:0": 100 * MIB}
    free = 900 * MIB
    child.become_ready()
    await loading
    lab.ram.pop(child.pid)
    free = 1000 * MIB
    await lab.meter.sample()
    child.die()
    await lab.settle()
    assert lab.events(*ENDS) == ["BecameReady", "WorkerExited", "Freed"]
    assert lab.state.ledgers["cuda:0"].held == 0


# ── starts, sleeps, wakes ───────────────────────────────────────────────────────────────────────


async def test_a_start_that_cannot_even_be_described_is_a_failed_load(make_lab, monkeypatch, caplog):
    """A model must not look like one that loads for ever."""
    lab = make_lab(a={})

    def fail(*_):
        raise ValueError("odd settings")

    monkeypatch.setattr(lab.fleet, "_specs", SimpleNamespace(of=fail))
    lab.inbox.post(ev.LoadWanted("a"))
    await lab.settle()
    assert lab.events(*ENDS) == ["LoadBroke", "Freed"]
    forgive(caplog, "odd settings")


@pytest.fixture
def orders(monkeypatch):
    """What the worker makes of the words to sleep and to wake: futures that the test resolves."""
    loop = asyncio.get_event_loop()
    given = SimpleNamespace(sleep=loop.create_future(), wake=loop.create_future())

    async def sleep(*_):
        await given.sleep

    async def wake(*_):
        await given.wake

    monkeypatch.setattr(sleeper, "tell_to_sleep", sleep)
    monkeypatch.setattr(fleet, "tell_to_wake", wake)
    return given


async def falling_asleep(lab):
    """A model that can sleep was told to, for another's room."""
    loading = asyncio.ensure_future(lab.desk.load("a"))
    await lab.settle()
    child = lab.child("a")
    lab.ram[child.pid] = 90 * MIB
    said = Ready(child.spec.token, Endpoint(socket="/run/a.sock"), [Capability.CHAT], "1.0", None, sleeps=True)
    child.becoming.set_result(said)
    await loading
    lab.inbox.post(ev.LoadWanted("b"))
    await lab.settle()
    assert lab.model("a").stopping
    return child


@pytest.fixture
async def sleepy(make_lab, orders) -> Lab:
    return make_lab(budget=150 * MIB, a={"sleep": True}, b={})


async def test_a_sleep_that_cannot_be_measured_is_none(sleepy, orders, monkeypatch):
    """Unknown is not nothing: what it keeps would be promised to others."""
    lab = sleepy
    monkeypatch.setattr(sleeper, "time", SimpleNamespace(monotonic=lambda: lab.now))
    monkeypatch.setattr(sleeper, "SLEEP_PAUSE", 0.0)
    child = await falling_asleep(lab)
    lab.ram.pop(child.pid)
    orders.sleep.set_result(None)
    await lab.settle()
    lab.now += 100.0
    await lab.settle()
    assert lab.events(*ENDS) == ["BecameReady", "SleepBroke", "Stopped", "Freed"]


async def test_a_worker_that_died_is_not_said_to_have_failed_to_sleep(sleepy, orders):
    """That would stop its successor."""
    lab = sleepy
    child = await falling_asleep(lab)
    child.die()
    await lab.settle()
    orders.sleep.set_exception(sleeper.SleepFailed("the connection broke"))
    await lab.settle()
    assert lab.events(*ENDS) == ["BecameReady", "WorkerExited", "Freed"]


@pytest.mark.parametrize("word", ["sleep", "wake"])
async def test_an_unexpected_fault_of_a_sleep_or_a_wake_wedges_nothing(sleepy, orders, caplog, word):
    """It leaves, or its wake is a failed load, as for any other reason."""
    lab = sleepy
    child = await falling_asleep(lab)
    if word == "sleep":
        orders.sleep.set_exception(ZeroDivisionError("odd"))
        await lab.settle()
        assert lab.events(*ENDS) == ["BecameReady", "SleepBroke", "Stopped", "Freed"]
    else:
        lab.ram[child.pid] = MIB
        orders.sleep.set_result(None)
        await lab.settle()
        lab.inbox.post(ev.UnloadWanted("b"))
        lab.inbox.post(ev.LoadWanted("a"))
        await lab.settle()
        orders.wake.set_exception(ZeroDivisionError("odd"))
        await lab.settle()
        assert lab.events(ev.Slept, ev.LoadBroke) == ["Slept", "LoadBroke"]
        assert lab.model("a").state is State.FAILED
    forgive(caplog, "odd")


# ── leases of outsiders ─────────────────────────────────────────────────────────────────────────


async def waiting_room(lab):
    """One that waits for the memory of another one."""
    first = await lab.rooms.take("ram", 900 * MIB, 60.0, 5.0, None, "first")
    second = asyncio.ensure_future(lab.rooms.take("ram", 900 * MIB, 60.0, 5.0, None, "second"))
    await lab.settle()
    return first.id, second


async def test_a_wish_for_memory_that_is_taken_back_in_the_moment_of_its_gift_ends(make_lab):
    """Nobody knows that lease, so nobody would give it back."""
    lab = make_lab(a={})
    first, second = await waiting_room(lab)
    lab.rooms.give_back(first)
    second.cancel()
    await asyncio.wait([second])
    assert second.cancelled()
    assert lab.rooms.views() == []
    assert lab.state.rooms == {}


async def test_a_lease_that_ends_in_the_moment_of_its_gift_is_not_handed_out(make_lab):
    """The daemon stops: the answer is no, and not a lease that waits for ever."""
    lab = make_lab(a={})
    first, second = await waiting_room(lab)
    lab.rooms.give_back(first)
    lab.inbox.post(ev.ShutdownWanted())
    with pytest.raises(NoRoom):
        await second


async def test_a_lease_and_a_model_of_the_same_name_are_two(make_lab):
    """A model may be called as leases are."""
    lab = make_lab(**{"lease-1": {}})
    await lab.resident("lease-1")
    room = await lab.rooms.take("ram", 100 * MIB, 60.0, 5.0, None, "a game")
    assert room.state == "held"
    assert lab.state.ledgers["ram"].bytes_of("lease-1") == 100 * MIB
