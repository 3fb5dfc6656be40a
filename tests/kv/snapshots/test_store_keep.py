"""What the store keeps, and who leaves for it."""

from __future__ import annotations

from pagein.kv.snapshots.answers import Fetched, Kept, Skipped
from pagein.kv.snapshots.index import MOST_BRANCHES
from pagein.kv.snapshots.room import LARGEST_CAP
from tests.kv.snapshots.build import FINGERPRINT, Clock, bytes_on_disk, fingerprint, ids, keep, offer, open_store


def test_an_empty_session_is_not_kept(tmp_path):
    """No tokens, or no bytes, are nothing to keep (scenario 6)."""
    store = open_store(tmp_path)
    for empty in (offer([], 10), offer([1], 0)):
        assert isinstance(store.can_put(empty), Skipped)
        assert isinstance(store.put(empty, [b""]), Skipped)


def test_a_missing_payload_file_is_skipped(tmp_path):
    """An engine that did not write its file leaves nothing."""
    store = open_store(tmp_path / "kv")
    assert isinstance(store.put(offer([1]), tmp_path / "missing.bin"), Skipped)
    assert bytes_on_disk(tmp_path) == 0


def test_a_growing_conversation_keeps_its_longest(tmp_path):
    """Each turn's snapshot takes the place of the one before; others that share its beginning stay."""
    store = open_store(tmp_path)
    other = keep(store, list(range(50)), conversation="other")
    first = keep(store, list(range(100)), conversation="c")
    second = keep(store, list(range(150)), conversation="c")
    assert second.left == (first.snapshot,)
    assert ids(store) == {other.snapshot.id, second.snapshot.id}


def test_conversations_without_a_name_grow_likewise(tmp_path):
    """A plain client that sends its whole history does not fill the disk with every turn."""
    store = open_store(tmp_path)
    for length in (100, 150, 220):
        keep(store, list(range(length)))
    assert [entry.header.tokens for entry in store.entries()] == [220]


def test_nothing_is_written_twice(tmp_path):
    """The same tokens, or fewer of the same conversation, are kept already, and count as used (scenario 13)."""
    clock = Clock()
    store = open_store(tmp_path, clock)
    entry = keep(store, list(range(100)), conversation="c").snapshot
    store = open_store(tmp_path, clock)
    clock.now += 1000
    for again in (offer(list(range(100)), conversation="d"), offer(list(range(60)), conversation="c")):
        assert entry.id in store.can_put(again).reason
    assert store.idle_seconds(entry.id) > 999
    assert isinstance(store.put(offer(list(range(60)), conversation="c"), []), Skipped)
    assert store.idle_seconds(entry.id) < 1
    assert ids(store) == {entry.id}


def test_a_fork_keeps_both_histories_within_a_bound(tmp_path):
    """An edited turn does not take the place of the old branch; of many branches the longest unused leave."""
    store = open_store(tmp_path)
    kept = [keep(store, [*range(50), 1000 + n], conversation="c").snapshot.id for n in range(MOST_BRANCHES + 2)]
    assert ids(store) == set(kept[2:])


def test_the_cap_holds_at_all_times(tmp_path):
    """Three times the cap in sessions of two models and a foreign file: never above the cap on disk (scenario 8)."""
    (tmp_path / "notes.txt").write_bytes(b"x" * 5000)
    clock = Clock()
    store = open_store(tmp_path, clock, cap=50_000)
    pinned = keep(store, [7] * 10, 4000, conversation="pinned").snapshot
    assert store.pin(pinned.id)
    for number in range(40):
        clock.now += 10
        model = fingerprint(weights="ab"[number % 2] * 64)
        keep(store, [number] * 10, 4000, conversation=str(number), fingerprint=model)
        assert bytes_on_disk(tmp_path) == store.usage().bytes <= 50_000
    assert pinned.id in ids(store)
    assert {entry.header.conversation for entry in store.entries()} - {"pinned"} == {str(n) for n in range(32, 40)}
    assert (tmp_path / "notes.txt").exists()


def test_a_write_in_progress_counts(tmp_path):
    """What is half written is promised already: a second snapshot cannot use the same room."""
    store = open_store(tmp_path, cap=12_000)
    outcome = []

    def payload():
        outcome.append(store.put(offer([2] * 10, 7000, conversation="b"), [b"y" * 7000]))
        outcome.append(store.usage().reserved)
        yield b"x" * 7000

    assert isinstance(store.put(offer([1] * 10, 7000, conversation="a"), payload()), Kept)
    assert "no room" in outcome[0].reason
    assert outcome[1] > 7000
    assert store.usage().reserved == 0


def test_what_can_never_fit_moves_nobody(tmp_path):
    """Larger than the cap, or than all that may leave: refused with the numbers, and nothing leaves for it (rule 4)."""
    store = open_store(tmp_path, cap=20_000)
    small = keep(store, [1] * 10, 1000, conversation="small").snapshot
    large = keep(store, [2] * 10, 12_000, conversation="large").snapshot
    store.pin(large.id)
    for size, words in ((30_000, "the cap of the store is 20 KiB"), (15_000, "may leave")):
        asked = offer([3] * 10, size)
        assert words in store.can_put(asked).reason
        assert words in store.put(asked, [b"x" * size]).reason
    assert ids(store) == {small.id, large.id}


def test_the_least_valuable_leaves_first(tmp_path):
    """Idle seconds × bytes ÷ seconds saved decides; a use makes a snapshot young again, across a restart."""
    clock = Clock()
    store = open_store(tmp_path, clock, cap=15_000)
    old = keep(store, [1] * 10, 4000, conversation="old", seconds_saved=1.0).snapshot
    clock.now += 100
    dear = keep(store, [2] * 10, 4000, conversation="dear", seconds_saved=100.0).snapshot
    cheap = keep(store, [3] * 10, 4000, conversation="cheap", seconds_saved=1.0).snapshot
    clock.now += 100
    assert isinstance(store.fetch(old, tmp_path.parent / f"{tmp_path.name}.bin"), Fetched)
    clock.now += 1
    store = open_store(tmp_path, clock, cap=15_000)
    kept = keep(store, [4] * 10, 4000, conversation="new")
    assert kept.left == (cheap,)
    assert ids(store) == {old.id, dear.id, kept.snapshot.id}


def test_a_pin_passes_on_to_what_extends_it(tmp_path):
    """A pinned conversation stays pinned as it grows, until it is unpinned."""
    clock = Clock()
    store = open_store(tmp_path, clock, cap=12_000)
    first = keep(store, [1] * 10, 4000, conversation="c").snapshot
    store.pin(first.id)
    second = keep(store, [1] * 20, 4000, conversation="c").snapshot
    clock.now += 100
    keep(store, [2] * 10, 4000, conversation="d")
    keep(store, [3] * 10, 4000, conversation="e")
    assert second.id in ids(store)
    assert first.id not in ids(store)
    store.unpin(second.id)
    keep(store, [4] * 10, 8000, conversation="f")
    assert second.id not in ids(store)
    assert not store.pin("nobody")


def test_the_floor_of_the_disk_holds(tmp_path, monkeypatch):
    """A disk that would have less than the floor free afterwards gets nothing; leaving snapshots make room."""
    store = open_store(tmp_path, floor=10_000)
    entry = keep(store, [1] * 10, 4000, conversation="a").snapshot
    monkeypatch.setattr(store._shelf, "free_bytes", lambda: 18_500 - bytes_on_disk(tmp_path))
    kept = keep(store, [2] * 10, 4000, conversation="b")
    assert kept.left == (entry,)
    monkeypatch.setattr(store._shelf, "free_bytes", lambda: 9_000 - bytes_on_disk(tmp_path))
    refused = store.put(offer([3] * 10, 4000), [b"x" * 4000])
    assert "must keep 10 KiB" in refused.reason
    assert ids(store) == {kept.snapshot.id}


def test_the_default_cap_is_a_tenth_of_the_free_disk(tmp_path, monkeypatch):
    """With 100 GB free it is 10 GB, with more at most 20 GiB; what is stored already does not make it smaller."""
    monkeypatch.setattr("pagein.kv.snapshots.shelf.Shelf.free_bytes", lambda shelf: 100_000_000_000)
    store = open_store(tmp_path, cap=None)
    assert store.usage().cap == 10_000_000_000
    size = keep(store, [1] * 10, 5000).snapshot.bytes
    assert open_store(tmp_path, cap=None).usage().cap == 10_000_000_000 + size // 10
    monkeypatch.setattr("pagein.kv.snapshots.shelf.Shelf.free_bytes", lambda shelf: 10**15)
    assert open_store(tmp_path, cap=None).usage().cap == LARGEST_CAP


def test_a_lowered_cap_is_kept_at_start(tmp_path):
    """A store that is opened with less room lets the least valuable go at once."""
    store = open_store(tmp_path)
    for number in range(10):
        keep(store, [number] * 10, 4000, conversation=str(number))
    again = open_store(tmp_path, cap=20_000)
    assert again.usage().bytes == bytes_on_disk(tmp_path) <= 20_000
    assert len(ids(again)) == 4


def test_what_cannot_be_cut_back_covers_nothing_shorter(tmp_path):
    """A longer snapshot that only serves whole does not keep a shorter one from being written."""
    store = open_store(tmp_path)
    keep(store, list(range(100)), conversation="c", whole_only=True)
    shorter = keep(store, list(range(60)), conversation="c", whole_only=True).snapshot
    assert store.longest_match(FINGERPRINT, list(range(80))).snapshot == shorter
