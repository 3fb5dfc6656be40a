"""After a request: what is saved, when, and that whatever goes wrong with it only means that it is not kept."""

import asyncio
import errno
import os
import stat

import pytest

from pagein.daemon import keeper as module
from pagein.errors import SlotBusy, SlotRefused
from pagein.kv.snapshots import store as store_module
from pagein.kv.snapshots.worth import Pace
from pagein.protocol import Capability, Endpoint, Ready, StateFacts

from .slots import OTHER, TALK, World, faults_in


@pytest.fixture
async def world(tmp_path, monkeypatch, caplog):
    """A keeper with one worker; at the end nothing of it is left, and nothing failed unseen."""
    made = World(tmp_path, monkeypatch)
    await made.begin()
    yield made
    await made.close()
    assert not faults_in(caplog)


def lengths(world):
    """Tokens of what is saved."""
    return sorted(entry.header.tokens for entry in world.keeper.entries())


async def test_a_turn_is_saved_once_it_is_quiet(world):
    """Not at once: the next turn of the same talk may come in a moment, and then only that is saved."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.")
    await world.turn(TALK + "I see. And then?", "Well.")
    first, second = world.clock.sleepers
    first.set()
    await world.settle()
    assert world.engine.calls["save"] == 0
    second.set()
    world.clock.quiet.set()
    await world.settle()
    assert world.engine.calls["save"] == 1
    assert lengths(world) == [len(TALK) + 16 + 4]


async def test_a_slot_in_use_is_not_saved(world):
    """A turn that began meanwhile is not held up by the save of the one before; its own end is saved."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.")
    second = await world.prepare(TALK + "I see. And then?")
    world.clock.quiet.set()
    await world.settle()
    assert world.engine.calls["save"] == 0
    world.keeper.account("m", second, world.engine.answers(TALK + "I see. And then?", second.slot, "Well."))
    await world.settle()
    assert lengths(world) == [len(TALK) + 16 + 4]


async def test_what_has_nothing_new_is_not_saved_again(world):
    """Neither at eviction, after its turn was saved, nor after a restore without a turn."""
    await world.turn(TALK, "I see.")
    engine = world.engine
    await world.evict()
    assert engine.calls["save"] == 1
    assert lengths(world) == [len(TALK) + 5]


async def test_an_eviction_saves_what_is_not_saved_yet(world):
    """A model that leaves in the moment after a turn loses nothing of it."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.")
    await world.keeper.end("m")
    world.clock.quiet.set()
    await world.settle()
    assert lengths(world) == [len(TALK) + 5]


async def test_a_prompt_beyond_the_context_is_not_reckoned_with(world, monkeypatch):
    """The engine refused it: what its slot holds is no larger than the slot, and saving it takes no longer."""
    reckoned, can_save = [], Pace.can_save

    def note(pace, tokens, *more):
        reckoned.append(tokens)
        return can_save(pace, tokens, *more)

    monkeypatch.setattr(Pace, "can_save", note)
    await world.turn(TALK, "I see.")
    refused = await world.prepare("x" * 20_000)
    world.keeper.account("m", refused, None)
    await world.settle()
    assert len(reckoned) == 2
    assert max(reckoned) <= 4096


async def test_another_conversation_is_saved_before_it_is_displaced(world):
    """One slot, two talks that come at once: the first is on the disk before the second takes its place."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.")
    await world.turn(OTHER, "Red.")
    assert world.engine.calls["save"] == 1
    world.clock.quiet.set()
    await world.settle()
    assert lengths(world) == [len(OTHER) + 3, len(TALK) + 5]


async def test_a_slow_engine_does_not_hold_an_eviction_up(world, monkeypatch):
    """After the bound the model leaves; its conversation is left to its history, and nothing is left behind."""
    monkeypatch.setattr(module, "SAVE_BOUND", 0.02)
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.")
    engine = world.engine
    engine.gates["save"] = asyncio.Event()
    async with asyncio.timeout(10):
        await world.keeper.end("m")
    assert engine.calls["save"] == 1
    assert engine.closed
    assert not engine.folder.exists()
    world.clock.quiet.set()
    await world.settle()
    assert lengths(world) == []
    monkeypatch.setattr(module, "SAVE_BOUND", 2.0)
    await world.begin()
    assert (await world.turn(TALK)).kind == "empty"


async def test_an_eviction_waits_for_no_save_that_hangs(world, monkeypatch):
    """Also where the save after a turn has begun already and never ends."""
    monkeypatch.setattr(module, "SAVE_BOUND", 0.02)
    world.engine.gates["save"] = gate = asyncio.Event()
    await world.turn(TALK, "I see.")
    await world.until("save")
    async with asyncio.timeout(10):
        await world.keeper.end("m")
    gate.set()
    await world.settle()


@pytest.mark.parametrize("fault", [SlotBusy("busy"), SlotRefused("no space left on the device")])
async def test_a_save_that_the_engine_refuses_is_not_kept(world, fault):
    """The disk of the worker's folder is full, or the slot busy: the next turn is saved again."""
    world.engine.faults["save"] = fault
    await world.turn(TALK, "I see.")
    assert (lengths(world), world.keeper.counters["m"].saves) == ([], 0)
    world.engine.faults.clear()
    await world.turn(TALK + "I see. And then?", "Well.")
    assert (lengths(world), world.keeper.counters["m"].saves) == ([len(TALK) + 20], 1)


async def test_a_full_disk_loses_a_snapshot_and_nothing_else(world, monkeypatch):
    """Full amid the write: no half file stays, the model serves on, and what was saved before is there."""
    await world.turn(TALK, "I see.")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(store_module, "write_snapshot", full)
        await world.turn(OTHER, "Red.")
    assert lengths(world) == [len(TALK) + 5]
    await world.evict()
    assert (await world.turn(TALK + "I see. And?")).restored == len(TALK) + 5


async def test_above_the_cap_nothing_is_written(tmp_path, monkeypatch):
    """A snapshot that the cap has no room for is not kept; the request knows nothing of it."""
    world = World(tmp_path, monkeypatch, state={"disk": "1MiB"})
    await world.begin()
    await world.turn(TALK * 4, "I see.")
    assert (lengths(world), world.keeper.counters["m"].saves) == ([], 0)
    await world.evict()
    assert (await world.turn(TALK * 4)).kind == "empty"
    await world.close()


async def test_a_few_tokens_are_not_worth_a_file(world):
    """They are computed faster than a call takes."""
    await world.turn("Hello", "Hi.")
    assert world.engine.calls["save"] == 0


async def test_a_crash_keeps_what_was_saved_before(world):
    """A worker that is gone without a word is not asked for anything; its folder goes."""
    await world.turn(TALK, "I see.")
    world.clock.quiet.clear()
    await world.turn(TALK + "I see. And then?", "Well.")
    engine = world.engine
    world.keeper.forget("m")
    world.clock.quiet.set()
    await world.settle()
    assert engine.calls["save"] == 1
    assert not engine.folder.exists()
    await world.begin()
    assert (await world.turn(TALK + "I see. And then?")).restored == len(TALK) + 5


async def test_a_restart_finds_what_was_saved(world):
    """Another daemon on the same folder restores what the first one saved."""
    await world.turn(TALK, "I see.")
    await world.keeper.end("m")
    await world.keeper.close()
    world.keeper = world.opened()
    await world.begin()
    assert (await world.turn(TALK + "I see. And?")).restored == len(TALK) + 5


async def test_folders_of_workers_that_are_gone_are_removed(world):
    """What an earlier daemon left half-way goes; the folder of a worker that it left alive stays, and serves."""
    kv = world.folder / "kv"
    (kv / "incoming" / "half.kv").write_bytes(b"half")
    for name in ("dead", "alive"):
        (kv / "slots" / name).mkdir()
        (kv / "slots" / name / "x.kv").write_bytes(b"x")
    await world.keeper.end("m")
    await world.keeper.close()
    world.keeper = world.opened()
    world.keeper.sweep({str(kv / "slots" / "alive")}, {})
    assert not (kv / "incoming" / "half.kv").exists()
    assert [path.name for path in (kv / "slots").iterdir()] == ["alive"]
    (kv / "slots" / "alive" / "x.kv").unlink()
    (kv / "slots" / "alive").rmdir()


async def test_a_worker_that_was_taken_over_is_served(world):
    """Its slots hold what nobody told this daemon: it is saved again, and restored where that pays."""
    await world.turn(TALK, "I see.")
    cells, folder = dict(world.engine.cells), world.engine.folder
    await world.keeper.close()  # the daemon died and left the worker alive
    world.keeper = world.opened()
    world.keeper.sweep({str(folder)}, {})
    engine = await world.begin()
    engine.cells = cells
    back = await world.turn(TALK + "I see. And then?", "Well.")
    assert back.restored in (0, len(TALK) + 5)
    assert lengths(world) == [len(TALK) + 20]
    folder.rmdir()


@pytest.mark.parametrize("prompt", [TALK, ["a picture", 7]])
async def test_a_worker_that_another_tenant_left_is_emptied_first(world, prompt):
    """Its slots hold what was said under another key: no request of this one reuses it, nor is it saved."""
    await world.turn(TALK, "I see.")
    cells, folder = dict(world.engine.cells), world.engine.folder
    await world.keeper.close()
    world.keeper = world.opened(state={"salt": "another tenant", "disk": 100_000_000})
    world.keeper.sweep({str(folder)}, {})
    engine = await world.begin()
    engine.cells = cells
    prepared = await world.prepare(prompt)
    assert (engine.calls["erase"], engine.cells[0]) == (1, [])
    world.keeper.account("m", prepared, None)
    again = await world.turn(TALK, "I see.")
    assert engine.calls["erase"] == 1
    assert again.restored == 0
    folder.rmdir()


async def test_files_are_for_their_owner_only(world):
    """Folders 0700, snapshots 0600, whatever the umask is."""
    before = os.umask(0)
    try:
        await world.turn(TALK, "I see.")
    finally:
        os.umask(before)
    (entry,) = world.keeper.entries()
    assert stat.S_IMODE(entry.path.stat().st_mode) == 0o600
    for folder in (entry.path.parent, entry.path.parent.parent, world.keeper.slots, world.folder / "kv" / "incoming"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


async def test_workers_that_tell_no_state_are_left_alone(world):
    """Another engine, another way, an encoder: nothing is asked of them and nothing changes."""
    await world.keeper.end("m")
    endpoint, facts = Endpoint(socket="/s"), StateFacts("other", str(world.folder), 1, "b", 1, "f16", "f16")
    for state in (None, facts):
        world.keeper.begin(world.entry, Ready("t", endpoint, [Capability.CHAT], "1", state=state))
        prepared = await world.prepare(TALK)
        assert (prepared.tokens, prepared.miss) == (None, None)
    world.attention = "none"
    await world.begin()
    prepared = await world.prepare(TALK)
    assert (prepared.tokens, prepared.miss) == (None, None)
    world.engine.folder.rmdir()


async def test_after_the_end_nothing_begins(world):
    """A worker that becomes ready while the daemon stops is not kept."""
    await world.keeper.end("m")
    await world.keeper.close()
    engine = await world.begin()
    assert (await world.prepare(TALK)).tokens is None
    assert sum(engine.calls.values()) == 0
    engine.folder.rmdir()
