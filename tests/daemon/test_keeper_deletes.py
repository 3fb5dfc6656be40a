"""What is deleted is gone: snapshots of a conversation go with it, and no live slot brings them back."""

import threading
import time

import pytest

from pagein.errors import SlotBusy
from pagein.history import Gone, TurnOf
from pagein.kv.snapshots import store as store_module
from pagein.kv.snapshots.reuse import Counted

from .slots import OTHER, TALK, World, faults_in

ON = TALK + "I see. And then?"


@pytest.fixture
async def world(tmp_path, monkeypatch, caplog):
    """A keeper with one worker; at the end nothing of it is left, and nothing failed unseen."""
    made = World(tmp_path, monkeypatch)
    await made.begin()
    yield made
    await made.close()
    assert not faults_in(caplog)


def turn_of(conversation):
    """A turn whose history is read now."""
    return TurnOf(conversation, time.monotonic())


def deleting(world, *conversations, wanted=True):
    """What the store of conversations tells."""
    return world.keeper.saving.forget([Gone(world.keeper._tenant, one) for one in conversations], wanted)


def saved_of(world):
    """Whose snapshots there are."""
    return sorted(entry.header.conversation or "" for entry in world.keeper.entries())


async def test_a_deleted_conversation_takes_its_snapshots_along(world):
    """Its own and no other's; the slot that holds its tokens is erased, so that nothing of it is saved again."""
    await world.turn(OTHER, "Red.", turn_of("b"))
    await world.turn(TALK, "I see.", turn_of("a"))
    assert saved_of(world) == ["a", "b"]
    await deleting(world, "a")
    assert saved_of(world) == ["b"]
    assert world.engine.cells[0] == []
    await world.evict()
    assert saved_of(world) == ["b"]
    assert (await world.turn(TALK)).kind == "tokens"


async def test_a_conversation_is_deleted_before_it_was_saved(world):
    """In the moment between the answer and the save: it is never written."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.", turn_of("a"))
    await deleting(world, "a")
    world.clock.quiet.set()
    await world.settle()
    assert (world.engine.calls["save"], world.engine.cells[0], saved_of(world)) == (0, [], [])


async def test_a_conversation_is_deleted_amid_its_turn(world):
    """The turn has its answer; then its slot is erased, and nothing is saved."""
    await world.turn(TALK, "I see.", turn_of("a"))
    prepared = await world.prepare(ON, turn_of("a"))
    await deleting(world, "a")
    assert (saved_of(world), world.engine.calls["erase"]) == ([], 0)
    world.keeper.account("m", prepared, world.engine.answers(ON, prepared.slot, "Well."))
    await world.settle()
    assert (saved_of(world), world.engine.cells[0], world.engine.calls["save"]) == ([], [], 1)


async def test_a_turn_that_had_read_what_is_deleted_since_is_not_saved(world):
    """It waited for its model meanwhile: what it was told is in its prompt."""
    whose = turn_of("a")
    await deleting(world, "a")
    await world.turn(TALK, "I see.", whose)
    assert (saved_of(world), world.engine.cells[0]) == ([], [])


async def test_a_conversation_of_which_a_part_was_deleted_goes_on(world):
    """An item or a response: what was computed of it goes, and the next turn is saved as ever."""
    await world.turn(TALK, "I see.", turn_of("a"))
    await deleting(world, "a")
    assert saved_of(world) == []
    await world.turn(OTHER, "Red.", turn_of("a"))
    assert saved_of(world) == ["a"]
    await world.evict()
    assert (await world.turn(OTHER + "Red. And?", "x", turn_of("a"))).restored == len(OTHER) + 3


async def test_a_deletion_amid_a_save_leaves_nothing(world, monkeypatch):
    """The engine had written it, the store was just at it: what it wrote is taken back."""
    begun, go_on, write = threading.Event(), threading.Event(), store_module.write_snapshot

    def slow(*given):
        begun.set()
        go_on.wait(20)
        write(*given)

    monkeypatch.setattr(store_module, "write_snapshot", slow)
    prepared = await world.prepare(TALK, turn_of("a"))
    world.keeper.account("m", prepared, world.engine.answers(TALK, 0, "I see."))
    await world.until("save")
    while not begun.is_set():
        await world.clock.sleep(0)
    done = deleting(world, "a")
    go_on.set()
    await done
    assert (saved_of(world), world.engine.cells[0]) == ([], [])
    assert not list((world.folder / "kv" / "incoming").iterdir())


async def test_a_prefix_that_another_conversation_used_goes_with_its_owner(world):
    """Saved under one, restored for the other: what the other computed of its own stays, else it computes anew."""
    world.slots = 2
    await world.evict()
    await world.turn(TALK, "I see.", turn_of("a"))
    await world.evict()
    other = await world.turn(ON, "Well.", turn_of("b"))
    assert other.restored == len(TALK) + 5
    assert saved_of(world) == ["a", "b"]
    await deleting(world, "a")
    assert saved_of(world) == ["b"]
    assert world.engine.cells[other.slot], "the slot is the other's"
    await deleting(world, "b")
    assert (saved_of(world), world.engine.cells) == ([], {0: [], 1: []})


async def test_what_is_not_known_to_be_anothers_is_erased(world):
    """A worker that was taken over, or a turn whose slot the engine chose: nobody can tell that it is not of these."""
    world.engine.cells[0] = [ord(letter) for letter in TALK]
    await deleting(world, "a")
    assert world.engine.cells[0] == []


async def test_a_slot_that_cannot_be_erased_is_not_saved(world):
    """The engine is still at a request whose client left: what it holds counts as nothing."""
    world.clock.quiet.clear()
    await world.turn(TALK, "I see.", turn_of("a"))
    world.engine.faults["erase"] = SlotBusy("busy")
    await deleting(world, "a")
    world.engine.faults.clear()
    await world.evict()
    world.clock.quiet.set()
    await world.settle()
    assert saved_of(world) == []


async def test_a_snapshot_that_was_restored_is_erased_with_its_conversation(world):
    """Also where the turn that it was restored for never began."""
    await world.turn(TALK, "I see.", turn_of("a"))
    await world.evict()
    live = world.keeper._live["m"]
    await world.keeper._restoring._bring_back(live, 0, world.keeper.entries()[0])
    assert world.engine.cells[0]
    await deleting(world, "a")
    assert world.engine.cells[0] == []


async def test_a_first_turn_that_was_not_kept_leaves_nothing_on_the_disk(world):
    """The live slot stays, so that the same turn, sent again, need not compute it again; then that is saved."""
    prepared = await world.prepare(TALK, turn_of("never"))
    world.keeper.account("m", prepared, world.engine.answers(TALK, 0, "I"))
    await deleting(world, "never", wanted=False)
    await world.settle()
    assert (saved_of(world), world.engine.calls["erase"]) == ([], 0)
    again = await world.turn(TALK, "I see.", turn_of("kept"))
    assert again.reason.endswith("tokens are still there")
    assert saved_of(world) == ["kept"]


async def test_snapshots_of_unknown_conversations_go_at_start(world):
    """A crash came between the deletion and that of the snapshots; those of no conversation stay."""
    await world.turn(TALK, "I see.", turn_of("a"))
    await world.turn(OTHER, "Red.", turn_of("b"))
    await world.turn(OTHER + TALK, "Red.")
    await world.keeper.saving.keep_only({Gone(world.keeper._tenant, "b"), Gone("another", "a")})
    assert saved_of(world) == ["", "b"]


async def test_what_was_moved_aside_goes_with_any_conversation(world):
    """Nobody can tell whose it was."""
    await world.turn(TALK, "I see.", turn_of("a"))
    (entry,) = world.keeper.entries()
    data = bytearray(entry.path.read_bytes())
    data[-70] ^= 1
    entry.path.write_bytes(data)
    await world.evict()
    assert (await world.turn(TALK, "I see.")).kind == "damaged"
    damaged = world.folder / "kv" / "snapshots" / "damaged"
    assert list(damaged.iterdir())
    await deleting(world, "unsaid", wanted=False)
    assert list(damaged.iterdir())
    await deleting(world, "a")
    assert not list(damaged.iterdir())


# ── removed by hand, or for room ────────────────────────────────────────────────────────────────────


async def _removed(world):
    world.keeper.store.remove([entry.id for entry in world.keeper.entries()])
    await world.keeper.saving.recheck()


async def test_a_removed_snapshot_is_not_saved_again(world):
    """The live slot no longer counts as saved; it is saved when its turn goes on, not when it leaves."""
    await world.turn(TALK, "I see.")
    await _removed(world)
    held = world.keeper._live["m"].table.held(0)
    assert (held.saved, held.left) == (False, True)
    await world.turn(OTHER, "Red.")
    assert saved_of(world) == [""], "only what came after it"
    await world.turn(ON, "Well.")
    await _removed(world)
    await world.evict()
    assert saved_of(world) == []


async def test_a_removed_snapshot_is_saved_with_its_next_turn(world):
    """Whole, with what was said before."""
    await world.turn(TALK, "I see.")
    await _removed(world)
    await world.turn(ON, "Well.")
    assert [entry.header.tokens for entry in world.keeper.entries()] == [len(ON) + 4]


async def test_what_a_longer_snapshot_covers_counts_as_saved(world):
    """Another was removed: what lies on the disk still is what the slot holds."""
    world.slots = 2
    await world.evict()
    first = await world.turn(TALK, "I see.")
    await world.turn(OTHER, "Red.")
    gone = next(entry for entry in world.keeper.entries() if entry.header.tokens == len(OTHER) + 3)
    world.keeper.store.remove([gone.id])
    await world.keeper.saving.recheck()
    assert world.keeper._live["m"].table.held(first.slot).saved
    assert world.keeper._live["m"].table.held(1 - first.slot).left


async def test_what_left_for_room_no_longer_counts_as_saved(tmp_path, monkeypatch):
    """The cap has room for one: the live slot of the other is known to be nowhere else."""
    world = World(tmp_path, monkeypatch, state={"disk": "1MiB"})
    world.slots = 2
    await world.begin()
    long, other = TALK * 2, OTHER * 2
    first = await world.turn(long, "I see.")
    second = await world.turn(other, "Red.")
    table = world.keeper._live["m"].table
    assert len(world.keeper.entries()) == 1
    assert (table.held(first.slot).saved, table.held(second.slot).saved) == (False, True)
    await world.close()


# ── a client that leaves ────────────────────────────────────────────────────────────────────────────


async def test_a_prompt_that_was_cut_off_is_not_claimed(world):
    """The client left amid the prompt: the next request asks the engine how far it got, and counts on that."""
    world.clock.quiet.clear()
    prepared = await world.prepare(TALK * 2)
    world.engine.cells[0] = [ord(letter) for letter in TALK * 2][:40]
    world.keeper.account("m", prepared, None)
    again = await world.prepare(TALK * 2)
    assert world.engine.calls["save"] == 1
    assert again.reason == f"40 of {2 * len(TALK)} tokens are still there"
    world.keeper.account("m", again, None)


async def test_what_is_not_known_is_brought_back(world):
    """The engine cannot be asked, either: only what was there before the prompt is counted on."""
    await world.turn(TALK, "I see.")
    await world.turn(ON, "Well.")
    await world.evict()
    world.clock.quiet.clear()
    prepared = await world.prepare(TALK[:40] + "?" * 60)
    assert prepared.restored == 40
    world.keeper.account("m", prepared, None)
    world.engine.faults["save"] = SlotBusy("busy")
    again = await world.prepare(ON + "Well.")
    assert again.restored == len(ON) + 4
    world.keeper.account("m", again, None)


async def test_an_answer_that_began_proves_its_prompt(world):
    """The client left amid the answer: all of the prompt is still there, without asking."""
    world.clock.quiet.clear()
    prepared = await world.prepare(TALK)
    world.engine.answers(TALK, 0, "I")
    world.keeper.account("m", prepared, None, True)
    again = await world.prepare(TALK + "!")
    assert again.reason == f"{len(TALK)} of {len(TALK) + 1} tokens are still there"
    assert world.engine.calls["save"] == 0
    world.keeper.account("m", again, None)


# ── speeds ──────────────────────────────────────────────────────────────────────────────────────────


async def test_measured_speeds_outlive_a_restart(world):
    """The next daemon decides by what this one measured; another build of the engine is measured anew."""
    prepared = await world.prepare(TALK)
    world.engine.answers(TALK, 0, "I see.")
    world.keeper.account("m", prepared, Counted(0, 100_000, prompt_seconds=0.001))
    await world.settle()
    await world.keeper.end("m")
    await world.keeper.close()
    world.keeper = world.opened()
    await world.begin()
    missed = await world.prepare(TALK)
    assert missed.kind in ("slower", "tokens", "empty")
    assert world.keeper._live["m"].pace.prefill.measured
    world.keeper.account("m", missed, None)
    await world.keeper.end("m")
    world.build = "b2"
    await world.begin()
    assert not world.keeper._live["m"].pace.prefill.measured
