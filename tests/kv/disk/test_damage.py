"""Damage of every kind: a miss of what it hits, and nothing else changes (scenarios 5, 6, 12 of the KV list)."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3

import pytest

from pagein.errors import BlockDamaged
from pagein.kv.disk.catalogue import NAME
from pagein.kv.snapshots.answers import Miss, Skipped
from tests.kv.disk.build import (
    FULL,
    GROUPS,
    LENGTHS,
    SLOT,
    check_account,
    check_found,
    content,
    open_store,
    save,
    text,
    words,
)

SAID = words(200)


@pytest.fixture
def folder(tmp_path):
    """A closed store with one conversation."""
    store = open_store(tmp_path / "kv")
    save(store, text(SAID), GROUPS, conversation="c")
    store.close()
    return tmp_path / "kv"


def flip(path, at):
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 0x41]))


def slots(folder):
    (path,) = folder.glob("*.slots")
    return path


def look(folder):
    """Open, read whatever is found through to the end, write again what is missing; return what was found at first."""
    store = open_store(folder)
    first = store.walk(text(SAID), GROUPS)
    for _ in range(9):
        found = store.walk(text(SAID), GROUPS)
        if isinstance(found, Miss):
            break
        try:
            check_found(store, text(SAID), found)
            break
        except BlockDamaged:
            continue
    else:
        raise AssertionError("damage does not end")
    good = 0 if isinstance(found, Miss) else found.length
    save(store, text(SAID), GROUPS, conversation="c")
    again = store.walk(text(SAID), GROUPS)
    assert again.length == 200
    check_found(store, text(SAID), again)
    check_account(store, folder)
    store.close()
    return (0 if isinstance(first, Miss) else first.length), good


def test_a_flipped_byte_in_any_piece_of_any_block_is_found(folder):
    """A byte that changed in a piece makes that block leave when it is read; every other block reads well."""
    for at in range(8):
        for within in (0, LENGTHS[0] - 1, SLOT - LENGTHS[1], SLOT - 1):  # both ends of both pieces
            flip(slots(folder), SLOT * at + within)
            store = open_store(folder)
            bad = store.verify()
            assert len(bad) == 1
            assert store.usage().blocks == 7
            assert store.verify() == []
            save(store, text(SAID), GROUPS, conversation="c")
            assert store.walk(text(SAID), GROUPS).length == 200
            store.close()


def test_one_layer_of_a_block_is_verified_alone(folder):
    """Damage in one piece is nothing to who reads another; who reads it loses the block."""
    flip(slots(folder), 20_480)  # the second piece of the first slot
    store = open_store(folder)
    refs = {ref for refs in store.walk(text(SAID), GROUPS).refs.values() for ref in refs}
    (first,) = [ref for ref in refs if store._find(ref).slot.offset == 0]
    store.read(first, bytearray(LENGTHS[0]), slice(0, 1))
    with pytest.raises(BlockDamaged, match="piece 1 of 2") as caught:
        store.read(first, bytearray(LENGTHS[1]), slice(1, 2))
    assert caught.value.ref == first
    with pytest.raises(BlockDamaged, match="has left"):
        store.read(first, bytearray(LENGTHS[0]), slice(0, 1))
    store.close()


@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_file_of_slots_loses_what_is_cut_off(folder, tenth):
    """Blocks that the file does not have any more are dropped at the start, those before it serve on."""
    path = slots(folder)
    os.truncate(path, path.stat().st_size * tenth // 10 + 5 * (tenth % 2))
    store = open_store(folder)
    assert store.usage().blocks == 8 * tenth // 10
    assert store.verify() == []
    store.close()
    assert look(folder)[1] in (0, 200)


@pytest.mark.parametrize("tenth", range(10))
def test_a_truncated_catalogue_is_never_a_wrong_answer(folder, tenth):
    """A catalogue that is cut short is moved aside; what it names no more is gone, and its slots are given back."""
    os.truncate(folder / NAME, (folder / NAME).stat().st_size * tenth // 10 + 7 * (tenth % 2))
    first, _ = look(folder)
    assert first == 0 or tenth > 4
    assert len(list(folder.glob("*.slots"))) == 1


def test_a_flipped_byte_anywhere_in_the_catalogue_is_never_a_wrong_answer(folder, tmp_path):
    """Rows carry a seal: what changed on the disk is dropped, or the whole catalogue, and no answer is wrong."""
    sound = {path.name: path.read_bytes() for path in folder.iterdir()}
    size = len(sound[NAME])
    served = set()
    for at in range(0, size, max(1, size // 97)):
        for path in folder.iterdir():
            path.unlink()
        for name, data in sound.items():
            (folder / name).write_bytes(data)
        flip(folder / NAME, at)
        served.add(look(folder)[1])
    assert served <= {0, 200}
    assert len(served) == 2


def test_a_token_that_flipped_in_the_catalogue_serves_no_other_text(folder):
    """The tokens of a row are compared with the prompt's, so a row whose tokens changed must not be believed."""
    base = sqlite3.connect(folder / NAME)
    other = text([SAID[0] + 1, *SAID[1:64]])
    base.execute("UPDATE nodes SET tokens = ? WHERE key = ?", (other.links[0].tokens, text(SAID).links[0].key))
    base.commit()
    base.close()
    store = open_store(folder)
    assert isinstance(store.walk(other, FULL), Miss)
    assert isinstance(store.walk(text(SAID), FULL), Miss)
    store.close()


@pytest.mark.parametrize("what", ["*.slots", NAME, "lock", "*"])
def test_missing_files_are_a_miss(folder, what):
    """What somebody removed is a miss, and is written again."""
    for path in folder.glob(what):
        path.unlink()
    assert look(folder) == ((200, 200) if what == "lock" else (0, 0))


def test_a_folder_that_vanishes_under_an_open_store_is_no_error(folder):
    """Somebody removes the folder while the store is open: reads and puts miss and are skipped, nothing else raises."""
    store = open_store(folder)
    shutil.rmtree(folder)
    with pytest.raises(BlockDamaged, match="No such file"):
        check_found(store, text(SAID), store.walk(text(SAID), FULL))
    assert isinstance(store.put(text(words(64, 5)), 0, "full", FULL["full"], [b"x" * 100]), Skipped)
    store.note_turn("d", text(words(64, 5)))
    assert store.usage().other_bytes == 0
    store.close()
    assert look(folder) == (0, 0)


def test_an_error_in_one_block_of_fifty_shortens_the_prefix(tmp_path, monkeypatch):
    """EIO in block 30: the prefix ends before it, the others stay, and once it is written again all serve."""
    store = open_store(tmp_path / "kv")
    said = words(50 * 64)
    prefix = text(said)
    save(store, prefix, conversation="c")
    refs = store.walk(prefix, FULL).refs["full"]
    bad = store._find(refs[30]).slot.offset
    real = os.preadv

    def broken(fd, views, at):
        if at == bad:
            raise OSError(errno.EIO, "Input/output error")
        return real(fd, views, at)

    monkeypatch.setattr(os, "preadv", broken)
    into = [bytearray(ref.bytes) for ref in refs]
    with pytest.raises(BlockDamaged, match="Input/output error") as caught:
        store.read_layer(refs, slice(None), into)
    assert caught.value.ref.index == 30
    assert store.walk(prefix, FULL).length == 30 * 64
    assert store.usage().blocks == 49
    assert store.verify() == []
    assert store.missing(prefix, FULL) == [(30, "full")]
    monkeypatch.undo()
    save(store, prefix)
    found = store.walk(prefix, FULL)
    assert found.length == len(said)
    check_found(store, prefix, found)
    store.close()


@pytest.mark.parametrize("call", ["pwritev", "posix_fallocate", "open"])
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, call):
    """ENOSPC in the middle of a put: skipped with the system's reason, nothing is left of it, what was there serves."""
    folder = tmp_path / "kv"
    store = open_store(folder)
    save(store, text(SAID), conversation="c")
    real = getattr(os, call)

    def full(*args, **kwargs):
        if call == "open" and not str(args[0]).endswith(".slots"):
            return real(*args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    other = text(words(64, 9))
    done = store.put(other, 0, "full", FULL["full"], [b"x" * 50_000])
    assert "No space left" in done.reason
    monkeypatch.undo()
    check_account(store, folder)
    assert store.usage().block_bytes == 4 * SLOT
    assert store.usage().spare_bytes == 0
    check_found(store, text(SAID), store.walk(text(SAID), FULL))
    save(store, other)
    assert store.walk(other, FULL).length == 64
    store.close()


def test_a_catalogue_that_cannot_be_written_is_told_later(tmp_path, monkeypatch):
    """Where the catalogue has no room now, blocks serve on, and the next change writes all of it."""
    store = open_store(tmp_path / "kv")
    real = store._catalogue.write

    def full(changes):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(store._catalogue, "write", full)
    save(store, text(SAID), conversation="c")
    assert store.walk(text(SAID), FULL).length == 200
    monkeypatch.setattr(store._catalogue, "write", real)
    store.close()
    store = open_store(tmp_path / "kv")
    assert store.walk(text(SAID), FULL).length == 200
    assert content(store, store.walk(text(SAID), FULL).refs["full"][0])
    store.close()


def test_a_short_file_under_an_open_store_is_damage(folder):
    """A file that is cut while it is open ends the prefix where it ends."""
    store = open_store(folder)
    found = store.walk(text(SAID), FULL)
    os.truncate(slots(folder), 0)
    with pytest.raises(BlockDamaged, match="bytes are there"):
        content(store, found.refs["full"][0])
    assert isinstance(store.walk(text(SAID), FULL), Miss)
    store.close()


def test_a_system_without_direct_writes_or_holes_works_through_the_cache(tmp_path, monkeypatch):
    """Where the disk takes no hole, deleted bytes are overwritten, files go as a whole, and the account stays right."""
    monkeypatch.setattr("pagein.kv.disk.system.punch", lambda fd, offset, length: False)
    monkeypatch.delattr(os, "O_DIRECT", raising=False)
    folder = tmp_path / "kv"
    store = open_store(folder)
    save(store, text(SAID), conversation="c")
    keep = text(words(64, 3))
    save(store, keep, conversation="d")
    check_found(store, text(SAID), store.walk(text(SAID), FULL))
    store.forget("c")
    assert (store.usage().blocks, store.usage().spare_bytes) == (1, 4 * SLOT)
    assert slots(folder).read_bytes()[: 4 * SLOT].count(0) == 4 * SLOT
    check_account(store, folder)
    save(store, text(SAID), conversation="c")
    assert store.usage().spare_bytes == 0
    store.forget("c")
    store.forget("d")
    assert list(folder.glob("*.slots")) == []
    store.close()
