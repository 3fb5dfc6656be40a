"""What the store makes of damaged snapshots."""

from __future__ import annotations

import errno
import os

from pagein.kv.snapshots.answers import Miss, MissKind
from pagein.kv.snapshots.shelf import MOST_DAMAGED
from pagein.kv.snapshots.treehash import BLOCK
from tests.kv.snapshots.build import bytes_on_disk, damage, fingerprint, ids, keep, miss, open_store


def test_a_damaged_payload_is_a_miss_and_moved_aside(tmp_path):
    """The first use finds it, nothing is handed over, the second use knows nothing of it (scenario 5)."""
    store = open_store(tmp_path / "kv")
    entry = keep(store, list(range(100))).snapshot
    damage(entry)
    found = store.fetch(entry, tmp_path / "slot.bin")
    assert isinstance(found, Miss)
    assert found.kind is MissKind.DAMAGED
    assert "payload" in found.reason
    assert not (tmp_path / "slot.bin").exists()
    miss(store, list(range(100)), MissKind.EMPTY)
    assert len(list((tmp_path / "kv" / "damaged").iterdir())) == 1
    assert store.usage().bytes == store.usage().damaged_bytes == bytes_on_disk(tmp_path / "kv")


def test_chunks_of_a_damaged_snapshot_do_not_come(tmp_path):
    """All of it is verified before the first block."""
    store = open_store(tmp_path)
    entry = keep(store, list(range(100))).snapshot
    damage(entry)
    assert store.chunks(entry).kind is MissKind.DAMAGED


def test_damage_is_bounded(tmp_path):
    """However much is damaged, only a few files are kept, within their share of the cap."""
    store = open_store(tmp_path)
    for number in range(3 * MOST_DAMAGED):
        entry = keep(store, [number] * 10, 1000, conversation=str(number)).snapshot
        damage(entry)
        assert store.verify(entry.id).kind is MissKind.DAMAGED
    assert len(list((tmp_path / "damaged").iterdir())) == MOST_DAMAGED
    large = keep(store, [99] * 10, 200_000).snapshot
    damage(large)
    assert store.verify(large.id).kind is MissKind.DAMAGED
    assert store.usage().damaged_bytes <= 100_000
    assert store.usage().bytes == bytes_on_disk(tmp_path)


def test_headers_that_broke_are_found_at_start(tmp_path):
    """Cut off, emptied, of another format or under another name: moved aside at the next start, the rest stands."""
    store = open_store(tmp_path)
    kept = [keep(store, [number] * 10, conversation=str(number)).snapshot for number in range(5)]
    os.truncate(kept[0].path, 100)
    os.truncate(kept[1].path, 0)
    data = kept[2].path.read_bytes()
    kept[2].path.write_bytes(data[:8] + b"\x02" + data[9:])  # a later format
    kept[3].path.rename(kept[3].path.with_name("0" * 24 + ".kv"))
    again = open_store(tmp_path)
    assert ids(again) == {kept[4].id}
    assert again.usage().bytes == bytes_on_disk(tmp_path)
    assert len(list((tmp_path / "damaged").iterdir())) == 4


def test_a_snapshot_of_another_fingerprint_folder_is_not_used(tmp_path):
    """A file that was moved between fingerprints is damage, even though it verifies."""
    store = open_store(tmp_path)
    one = keep(store, [1] * 10).snapshot
    other = keep(store, [2] * 10, fingerprint=fingerprint(weights="b" * 64)).snapshot
    os.rename(one.path, other.path.parent / one.path.name)
    assert ids(open_store(tmp_path)) == {other.id}


def test_a_missing_file_is_a_miss(tmp_path):
    """A snapshot that somebody removed is gone, and no longer counted (scenario 6)."""
    store = open_store(tmp_path)
    entry = keep(store, [1, 2, 3]).snapshot
    entry.path.unlink()
    assert store.fetch(entry, tmp_path / "x").kind is MissKind.GONE
    assert store.usage().bytes == 0


def test_a_target_that_cannot_be_written_is_a_miss_of_its_own(tmp_path):
    """The snapshot is not to blame: it stays."""
    store = open_store(tmp_path)
    entry = keep(store, [1, 2, 3]).snapshot
    assert store.fetch(entry, tmp_path / "nowhere" / "x").kind is MissKind.FAILED
    assert ids(store) == {entry.id}


def test_a_read_error_is_a_miss(tmp_path, monkeypatch):
    """An I/O error in the middle of the payload hands nothing over (scenario 12)."""
    store = open_store(tmp_path, cap=10 * BLOCK)
    entry = keep(store, list(range(100)), 3 * BLOCK).snapshot
    read = os.pread

    def failing(descriptor, count, offset):
        if offset > BLOCK:
            raise OSError(errno.EIO, "Input/output error")
        return read(descriptor, count, offset)

    monkeypatch.setattr("pagein.kv.snapshots.reader.SnapshotReader._read_trailer", lambda reader, first: b"")
    monkeypatch.setattr(os, "pread", failing)
    found = store.fetch(entry, tmp_path / "slot.bin")
    assert found.kind is MissKind.DAMAGED
    assert "Input/output error" in found.reason
    assert not (tmp_path / "slot.bin").exists()


def test_too_many_open_files_damage_nothing(tmp_path, monkeypatch):
    """What says nothing about the snapshot leaves it where it is, at its use and at a start."""
    store = open_store(tmp_path)
    entry = keep(store, [1, 2, 3]).snapshot
    opened = os.open

    def failing(path, *args, **kwargs):
        if str(path).endswith(".kv"):
            raise OSError(errno.EMFILE, "Too many open files")
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    assert store.fetch(entry, tmp_path / "x").kind is MissKind.FAILED
    assert open_store(tmp_path).usage().other_bytes == entry.bytes
    monkeypatch.undo()
    assert ids(store) == ids(open_store(tmp_path)) == {entry.id}


def test_a_snapshot_in_the_place_of_another_is_not_used(tmp_path):
    """Two sound files that were exchanged under a running store are a miss each: nothing is mixed."""
    store = open_store(tmp_path / "kv")
    one, other = (keep(store, [n] * 10, conversation=str(n)).snapshot for n in (1, 2))
    os.rename(one.path, tmp_path / "aside")
    os.rename(other.path, one.path)
    os.rename(tmp_path / "aside", other.path)
    assert store.fetch(one, tmp_path / "slot.bin").kind is MissKind.DAMAGED
    assert not (tmp_path / "slot.bin").exists()
    assert store.chunks(other).kind is MissKind.DAMAGED
