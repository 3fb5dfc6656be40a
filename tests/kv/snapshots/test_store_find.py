"""What the store finds, and what it never mixes."""

from __future__ import annotations

import shutil

import pytest

from pagein.kv.snapshots.answers import Fetched, Match, MissKind
from pagein.kv.snapshots.key import media_tokens, tenant_tag
from tests.kv.snapshots.build import FINGERPRINT, bytes_on_disk, fingerprint, ids, keep, miss, open_store, payload_of


def test_the_longest_prefix_is_found_and_handed_over(tmp_path):
    """A prompt that goes on from a stored conversation gets its payload, byte for byte, across a restart (13)."""
    tokens = list(range(300))
    keep(open_store(tmp_path), tokens, 5000)
    store = open_store(tmp_path)
    match = store.longest_match(FINGERPRINT, [*tokens, 7, 8, 9])
    assert isinstance(match, Match)
    assert match.common_tokens == 300
    fetched = store.fetch(match.snapshot, tmp_path / "slot.bin")
    assert isinstance(fetched, Fetched)
    assert fetched.bytes == 5000
    assert (tmp_path / "slot.bin").read_bytes() == b"".join(payload_of(tokens, 5000))
    assert b"".join(store.chunks(match.snapshot)) == b"".join(payload_of(tokens, 5000))


def test_of_equal_prefixes_the_smaller_snapshot_is_restored(tmp_path):
    """A long snapshot of which little is used costs more to read."""
    store = open_store(tmp_path)
    keep(store, list(range(100)), 9000, conversation="long")
    small = keep(store, list(range(50)), 500, conversation="short")
    match = store.longest_match(FINGERPRINT, [*range(40), 999])
    assert match == Match(small.snapshot, 40)


def test_a_prompt_that_differs_early_reuses_only_what_is_the_same(tmp_path):
    """Tokens that differ at position 5 give five, or an honest miss where more are asked for (scenario 3)."""
    store = open_store(tmp_path)
    keep(store, list(range(100)))
    prompt = [*range(5), 999, *range(6, 100)]
    assert store.longest_match(FINGERPRINT, prompt).common_tokens == 5
    reason = miss(store, prompt, MissKind.TOKENS, at_least=16)
    assert "5 tokens" in reason
    assert "at least 16" in reason


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": "b" * 64}, "weights: bbbbbbbbbbbb…, the snapshot has aaaaaaaaaaaa…"),
        ({"kv_type_k": "q8_0"}, "KV type of K: q8_0, the snapshot has f16"),
        ({"rope": {"freq_base": "1"}}, "rope freq_base: 1, the snapshot has 10000"),
        ({"adapters": ("t" * 64,)}, "adapters"),
        ({"context": 8192}, "context: 8192, the snapshot has 4096"),
    ],
    ids=lambda value: "",
)
def test_other_settings_are_a_miss_that_names_the_field(tmp_path, change, words):
    """The same tokens of other weights, types or settings are refused, and the reason has both values (scenario 4)."""
    store = open_store(tmp_path)
    keep(store, list(range(100)))
    reason = miss(store, list(range(100)), MissKind.SETTINGS, fingerprint=fingerprint(**change))
    assert reason.startswith("100 of these tokens are stored")
    assert words in reason


def test_the_nearest_of_other_settings_is_named(tmp_path):
    """Of several, the one that shares most tokens and then differs least explains the miss."""
    store = open_store(tmp_path)
    keep(store, list(range(100)), fingerprint=fingerprint(kv_type_k="q4_0", kv_type_v="q4_0"))
    keep(store, list(range(100)), fingerprint=fingerprint(build="b1"))
    keep(store, list(range(50)), fingerprint=fingerprint(context=1))
    reason = miss(store, list(range(100)), MissKind.SETTINGS)
    assert reason.endswith("engine build: b11549, the snapshot has b1")


def test_tenants_share_nothing_and_learn_nothing(tmp_path):
    """Another tenant's snapshot is neither used nor mentioned, before and after a restart (scenario 19)."""
    mine, yours = (fingerprint(tenant=tenant_tag(b"salt", name)) for name in ("mine", "yours"))
    named_like_it = fingerprint(tenant=yours.tenant, adapters=(mine.tenant,))
    first = open_store(tmp_path)
    keep(first, list(range(100)), fingerprint=mine)
    for store in (first, open_store(tmp_path)):
        assert miss(store, list(range(100)), MissKind.EMPTY, fingerprint=yours) == miss(
            store, [5, 5], MissKind.EMPTY, fingerprint=yours
        )
        miss(store, list(range(100)), MissKind.EMPTY, fingerprint=named_like_it)
        assert store.longest_match(mine, list(range(100))).common_tokens == 100


def test_what_cannot_be_cut_back_serves_only_what_goes_on(tmp_path):
    """Of a recurrent model, a snapshot is used where the prompt begins with all of it and has more (scenario 14)."""
    store = open_store(tmp_path)
    entry = keep(store, list(range(100)), whole_only=True).snapshot
    assert store.longest_match(FINGERPRINT, list(range(101))) == Match(entry, 100)
    for prompt in ([*range(90), 999, 1000], list(range(60)), list(range(100))):
        assert "cannot be cut back" in miss(store, prompt, MissKind.UNCUT)


def test_a_shorter_whole_one_is_found_behind_a_longer(tmp_path):
    """Where the longest cannot be cut back, the one of the turn before serves an edited last turn."""
    store = open_store(tmp_path)
    before = keep(store, list(range(100)), conversation="c", whole_only=True).snapshot
    keep(store, list(range(200)), conversation="c", whole_only=True)
    assert store.longest_match(FINGERPRINT, [*range(150), 999]) == Match(before, 100)
    keep(store, list(range(300)), conversation="c", whole_only=True)
    assert sorted(entry.header.tokens for entry in store.entries()) == [200, 300]


def test_images_tell_conversations_apart(tmp_path):
    """The same text with another image of as many positions is reused up to the image (scenario 20)."""
    store = open_store(tmp_path)
    keep(store, [1, 2, 3, *media_tokens("a" * 64, 70), 4])
    assert store.longest_match(FINGERPRINT, [1, 2, 3, *media_tokens("a" * 64, 70), 4, 5]).common_tokens == 74
    assert store.longest_match(FINGERPRINT, [1, 2, 3, *media_tokens("b" * 64, 70), 4, 5]).common_tokens == 3
    assert min(media_tokens("a" * 64, 70)) >= 2**31
    assert "32 bits" in miss(store, [1, 2, -1], MissKind.TOKENS)


def test_a_folder_that_was_removed_is_made_again(tmp_path):
    """Whoever empties the state folder under a running daemon loses snapshots, not the store."""
    store = open_store(tmp_path / "kv")
    keep(store, [1, 2, 3])
    shutil.rmtree(tmp_path / "kv")
    kept = keep(store, [1, 2, 3]).snapshot
    assert ids(store) == {kept.id}
    assert store.usage().bytes == bytes_on_disk(tmp_path)


def test_an_empty_store_says_so(tmp_path):
    """Nothing stored is a miss of its own kind."""
    miss(open_store(tmp_path), [1, 2, 3], MissKind.EMPTY)


def test_an_empty_prompt_matches_nothing(tmp_path):
    """No tokens are no prefix."""
    store = open_store(tmp_path)
    keep(store, [1, 2])
    miss(store, [], MissKind.TOKENS)
