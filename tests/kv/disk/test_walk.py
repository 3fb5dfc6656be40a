"""Which prefix is found, for groups that need different parts of it."""

from __future__ import annotations

import pytest

from pagein.kv.blocks import keys
from pagein.kv.disk import Found, Kept, Policy
from pagein.kv.snapshots.answers import Miss, Skipped
from tests.kv.disk.build import FULL, GROUPS, check_found, open_store, payload, save, text, words


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "kv")
    yield store
    store.close()


def rows(found):
    return {group: [(ref.index, ref.rows) for ref in refs] for group, refs in found.refs.items()}


def test_a_text_is_found_with_every_group_s_part_of_it(store):
    """Full attention needs all blocks, a window those of its tokens, a state the one at exactly the length."""
    said = words(200)
    prefix = text(said)
    save(store, prefix, GROUPS)
    found = store.walk(text([*said, 1, 2, 3]), GROUPS)
    assert found.length == 200
    assert rows(found) == {
        "full": [(0, 64), (1, 64), (2, 64), (3, 8)],
        "sliding": [(1, 64), (2, 64), (3, 8)],
        "side": [(3, 8)],
    }
    check_found(store, prefix, found)


@pytest.mark.parametrize("at", [0, 1, 5, 63, 64, 65, 100, 128, 199])
def test_another_text_shares_what_it_begins_with(store, at):
    """A text that differs at one token uses exactly the tokens before it, inside a block, too."""
    said = words(200)
    save(store, text(said))
    other = [*said[:at], said[at] + 1, *said[at + 1 :]]
    found = store.walk(text(other), FULL)
    assert (found.length if isinstance(found, Found) else 0) == at


def test_a_partial_block_serves_a_longer_and_a_shorter_text(store):
    """The tail of a turn is used up to where the texts part, whichever is longer."""
    said = words(100)
    save(store, text(said))
    assert store.walk(text([*said, 7, 7, 7]), FULL).length == 100
    assert store.walk(text(said[:80]), FULL).length == 80


def test_the_child_that_agrees_for_longest_is_chosen(store):
    """Of several blocks that go on from the same place, the one with most of the text's tokens serves."""
    said = words(64)
    for tail in ([1, 2], [1, 2, 3, 4], [1, 9, 9, 9, 9]):
        save(store, text([*said, *tail]))
    found = store.walk(text([*said, 1, 2, 3, 5, 5]), FULL)
    assert found.length == 67
    assert found.refs["full"][1].tokens == 4


def test_a_state_serves_only_at_its_length(store):
    """Where a state is needed, the prefix ends at one, however far the other groups would go."""
    said = words(200)
    groups = {"full": Policy.every(), "side": Policy.exact()}
    for length in (70, 128, 200):
        save(store, text(said[:length]), groups)
    assert store.walk(text(said), groups).length == 200
    assert store.walk(text(said[:199]), groups).length == 128
    found = store.walk(text([*said[:100], 1, 2]), groups)
    assert found.length == 70
    assert rows(found)["side"] == [(1, 6)]
    assert isinstance(store.walk(text(said[:60]), groups), Miss)


def test_a_model_of_states_alone_is_served_by_its_own_tokens_only(store):
    """Without attention nothing but the tokens tells one state from another of the same length."""
    groups = {"side": Policy.exact()}
    said = words(100)
    save(store, text(said), groups)
    assert store.walk(text([*said, 1]), groups).length == 100
    assert isinstance(store.walk(text([*said[:99], said[99] + 1]), groups), Miss)
    assert isinstance(store.walk(text([*said[:70], *words(30, 1)]), groups), Miss)


def test_a_window_serves_where_its_last_tokens_are_there(store):
    """A sliding group that was saved at a length serves at shorter ones only as far as its window is still covered."""
    said = words(640)
    groups = {"full": Policy.every(), "sliding": Policy.sliding(130)}
    save(store, text(said), groups)
    assert [at for at, group in store.missing(text(said[:576]), groups)] == [6]
    found = store.walk(text([*said[:639], 5]), groups)
    assert found.length == 639
    assert [at for at, _ in rows(found)["sliding"]] == [7, 8, 9]
    assert store.walk(text([*said[:577], 5]), groups).length == 577
    assert isinstance(store.walk(text([*said[:576], 5]), groups), Miss)


def test_a_window_alone_does_not_need_what_left_it(store):
    """With sliding layers only, the blocks of the window are all that a prefix needs."""
    said = words(640)
    groups = {"sliding": Policy.sliding(64)}
    save(store, text(said), groups)
    assert store.usage().blocks == 1
    assert store.walk(text([*said, 1]), groups).length == 640


def test_a_layer_that_sees_only_itself_needs_nothing(store):
    """A window of one token asks for no block."""
    said = words(100)
    groups = {"full": Policy.every(), "narrow": Policy.sliding(1)}
    save(store, text(said), groups)
    assert store.walk(text(said), groups).refs["narrow"] == ()


def test_a_gap_ends_the_prefix(store):
    """A block that was not kept ends what full attention can use; what is behind it stays, and serves again later."""
    said = words(256)
    prefix = text(said)
    for index in (0, 1, 3):
        assert isinstance(store.put(prefix, index, "full", FULL["full"], payload(prefix, index, "full")), Kept)
    assert store.walk(prefix, FULL).length == 128
    assert store.missing(prefix, FULL) == [(2, "full")]
    save(store, prefix)
    assert store.walk(prefix, FULL).length == 256


def test_too_little_is_a_miss_that_says_how_much(store):
    """What is not worth a restore to the caller is a miss, and so is an unknown root."""
    said = words(100)
    save(store, text(said))
    missed = store.walk(text(said), FULL, at_least=101)
    assert "100 of 100 tokens" in missed.reason
    assert store.walk(text(said, weights="other"), FULL).kind == "empty"
    assert store.walk(text([]), FULL).kind == "tokens"


def test_tenants_share_nothing(store):
    """The same text of another tenant, model or adapter finds nothing; the tenant's own finds all."""
    said = words(150)
    save(store, text(said, tenant="a"), conversation="c")
    assert isinstance(store.walk(text(said, tenant="b"), FULL), Miss)
    assert isinstance(store.walk(text(said, adapter="a"), FULL), Miss)
    assert store.walk(text(said, tenant="a"), FULL).length == 150


def test_a_collision_is_a_miss(tmp_path, monkeypatch):
    """With keys that are all alike, only the text that was stored is found, and no other is written over it."""
    monkeypatch.setattr(keys, "next_key", lambda parent, tokens: b"k" * 32)
    store = open_store(tmp_path / "kv")
    groups = {"sliding": Policy.sliding(10)}
    one, other = words(64), words(64, seed=1)
    tail = words(64, seed=2)
    save(store, text(one), FULL, conversation="c")
    assert isinstance(store.walk(text(other), FULL), Miss)
    refused = store.put(text(other), 0, "full", FULL["full"], payload(text(other), 0, "full"))
    assert isinstance(refused, Skipped)
    assert "same key" in refused.reason
    assert store.walk(text(one), FULL).length == 64
    # A window that looks at the tail alone must not take another beginning for this one.
    refused = store.put(text(one + tail), 1, "sliding", groups["sliding"], [b"x" * 10])
    assert isinstance(refused, Skipped)
    assert isinstance(store.walk(text(other + tail), groups), Miss)
    store.close()
