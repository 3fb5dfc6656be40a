"""What a conversation holds, and what leaves with it."""

from __future__ import annotations

import pytest

from pagein.kv.disk import Policy
from pagein.kv.disk.holding import MOST_CHECKPOINTS
from pagein.kv.snapshots.answers import Miss
from tests.kv.disk.build import (
    FULL,
    GROUPS,
    SLOT,
    Clock,
    check_account,
    disk_bytes,
    open_store,
    payload,
    save,
    text,
    words,
)

SIDE = {"full": Policy.every(), "side": Policy.exact()}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def store(folder):
    store = open_store(folder)
    yield store
    store.close()


def test_forgetting_removes_blocks_bytes_and_tokens(store, folder):
    """Nothing of a forgotten conversation is on the disk: neither its KV nor its token ids."""
    said = words(200)
    prefix = text(said)
    save(store, prefix, GROUPS, conversation="c")
    needles = [payload(prefix, 1, "full")[0][:64], prefix.links[1].tokens[:64]]
    raw = b"".join(path.read_bytes() for path in folder.iterdir())
    assert all(needle in raw for needle in needles)
    gone = store.forget("c")
    assert (gone.blocks, gone.bytes) == (8, 8 * SLOT)
    raw = b"".join(path.read_bytes() for path in folder.iterdir())
    assert not any(needle in raw for needle in needles)
    assert store.usage().blocks == 0
    check_account(store, folder)


def test_forgetting_keeps_what_another_conversation_holds(store):
    """Blocks that two conversations begin with stay until both are forgotten; another tenant's are its own."""
    shared = words(128)
    one, other = text(shared + words(64, 1)), text(shared + words(64, 2))
    save(store, one, conversation="a")
    save(store, other, conversation="b")
    foreign = text(shared, tenant="t")
    save(store, foreign, conversation="a")
    assert store.forget("a").blocks == 1
    assert store.walk(other, FULL).length == 192
    assert store.walk(one, FULL).length == 128
    assert store.walk(foreign, FULL).length == 128
    assert store.forget("b").blocks == 3
    assert store.forget("b").blocks == 0
    assert store.forget("a", "t").blocks == 2


def test_a_longer_tail_replaces_the_partial_one(store):
    """The partial block of a turn leaves once the next turn's block has its tokens, and nothing needs its length."""
    said = words(300)
    for length in (70, 100, 130, 300):
        save(store, text(said[:length]), conversation="c")
        assert store.usage().blocks == -(-length // 64)
    assert store.walk(text(said), FULL).length == 300


def test_the_last_few_checkpoints_of_a_state_stay(store):
    """States and windows of the last turns stay so that a turn can be edited; older ones leave with their tails."""
    said = words(64 * 40)
    lengths = [64 * 3 * turn + 10 for turn in range(1, 9)]
    for length in lengths:
        save(store, text(said[:length]), SIDE, conversation="c")
    for length in lengths:
        found = store.walk(text([*said[:length], 1]), SIDE)
        assert (not isinstance(found, Miss)) == (length in lengths[-MOST_CHECKPOINTS:])
    assert store.usage().blocks == lengths[-1] // 64 + 2 * MOST_CHECKPOINTS
    assert store.forget("c").blocks == lengths[-1] // 64 + 2 * MOST_CHECKPOINTS


def test_states_at_whole_blocks_leave_though_their_blocks_stay(store):
    """A checkpoint that ends with a full block gives up its state and window, not what the text goes on from."""
    said = words(64 * 40)
    for turn in range(1, 10):
        save(store, text(said[: 128 * turn]), GROUPS, conversation="c")
    blocks = 2 * 9 + MOST_CHECKPOINTS + 2 * MOST_CHECKPOINTS
    assert store.usage().blocks == blocks
    for turn in range(1, 10):
        expected = 128 * turn if turn > 9 - MOST_CHECKPOINTS else 0
        found = store.walk(text(said[: 128 * turn]), GROUPS)
        assert (0 if isinstance(found, Miss) else found.length) == expected


def test_an_edited_turn_keeps_the_branch_that_it_left(store):
    """A conversation that goes another way keeps the old one for a while, and both go when it is forgotten."""
    said = words(128)
    first, second = text(said + words(64, 1)), text(said + words(64, 2))
    save(store, first, conversation="c")
    save(store, second, conversation="c")
    assert store.walk(first, FULL).length == store.walk(second, FULL).length == 192
    for seed in range(3, 3 + MOST_CHECKPOINTS):
        save(store, text(said + words(64, seed)), conversation="c")
    assert store.walk(first, FULL).length == 128
    assert store.forget("c").blocks == 2 + MOST_CHECKPOINTS


def test_each_model_of_a_conversation_has_checkpoints_of_its_own(store):
    """A conversation that goes on with another model keeps what it has of the first, and loses both when forgotten."""
    said = words(640)
    save(store, text(said[:100], weights="a"), SIDE, conversation="c")
    for turn in range(1, 10):
        save(store, text(said[: 60 * turn], weights="b"), SIDE, conversation="c")
    assert store.walk(text(said, weights="a"), SIDE).length == 100
    assert len(store.entries()) == 1
    store.forget("c")
    assert store.usage().blocks == 0


def test_what_no_conversation_holds_leaves_at_the_next_start(store, folder):
    """Blocks of a turn that never ended could not be forgotten by anybody: they do not outlive the process."""
    said = words(192)
    save(store, text(said[:128]), conversation="c")
    save(store, text(said))
    assert store.walk(text(said), FULL).length == 192
    store.close()
    again = open_store(folder)
    assert again.walk(text(said), FULL).length == 128
    check_account(again, folder)
    again.close()


def test_entries_say_what_forgetting_would_free(store):
    """Shared bytes count for both conversations, own bytes are those that leave."""
    shared = words(128)
    save(store, text(shared + words(64, 1)), conversation="a")
    save(store, text(shared + words(30, 2)), conversation="b")
    store.pin("b")
    by_name = {one.conversation: one for one in store.entries()}
    assert (by_name["a"].bytes, by_name["a"].own_bytes, by_name["a"].tokens) == (3 * SLOT, SLOT, 192)
    assert (by_name["b"].tokens, by_name["b"].pinned, by_name["a"].pinned) == (158, True, False)
    assert store.forget("a").bytes == by_name["a"].own_bytes


def test_idle_conversations_are_collected(folder):
    """`gc` forgets what is idle for longer than it is told, and pinned ones never."""
    clock = Clock()
    store = open_store(folder, clock)
    for at, name in enumerate(("old", "kept", "new")):
        clock.now = 1000.0 + 100 * at
        save(store, text(words(100, at)), conversation=name)
    store.pin("kept")
    assert [one.conversation for one in store.gc(max_idle=99)] == ["old"]
    assert {one.conversation for one in store.entries()} == {"kept", "new"}
    assert disk_bytes(folder) < 8 * SLOT + 512 * 1024
    store.close()
