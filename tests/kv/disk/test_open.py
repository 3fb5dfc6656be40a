"""Opening, looking, and one process at a time (scenario 13 of the KV list)."""

from __future__ import annotations

import os
import sqlite3
import stat
import subprocess
import sys

import pytest

from pagein.errors import StateBroken, StoreInUse
from pagein.kv.disk import BlockStore, Found
from pagein.kv.disk.catalogue import NAME
from tests.kv.disk.build import FULL, GROUPS, SLOT, Clock, check_account, check_found, open_store, save, text, words


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "state" / "kv"


def test_a_restart_finds_everything_and_writes_nothing_twice(folder):
    """What was put serves after a restart, and saving the same again finds all of it there."""
    store = open_store(folder)
    prefix = text(words(200))
    save(store, prefix, GROUPS, conversation="c")
    before = store.usage().block_bytes
    store.close()
    again = open_store(folder)
    assert again.missing(prefix, GROUPS) == []
    found = again.walk(prefix, GROUPS)
    assert found.length == 200
    check_found(again, prefix, found)
    assert again.usage().block_bytes == before
    assert [(one.conversation, one.tokens) for one in again.entries()] == [("c", 200)]
    check_account(again, folder)
    again.close()


def test_a_second_opener_is_told_who_has_it(folder):
    """Two writers would overwrite each other's slots: the second one gets an error that names folder and process."""
    store = open_store(folder)
    with pytest.raises(StoreInUse, match=f"process {os.getpid()}") as caught:
        open_store(folder)
    assert str(folder) in caught.value.message
    with pytest.raises(StoreInUse):
        BlockStore.look(folder)
    code = "import sys, pathlib; from pagein.kv.disk import BlockStore; BlockStore.look(pathlib.Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert "StoreInUse" in done.stderr
    store.close()
    open_store(folder).close()


def test_looking_needs_neither_xxhash_nor_a_worker(folder):
    """The daemon lists, counts and forgets while no worker runs, without the packages of an engine."""
    assert BlockStore.look(folder) is None
    assert not folder.exists()
    store = open_store(folder)
    save(store, text(words(200)), conversation="c")
    save(store, text(words(100, 1)), conversation="d")
    store.close()
    code = """
import sys
for name in ("xxhash", "numpy", "torch"):
    sys.modules[name] = None
from pathlib import Path
from pagein.kv.disk import BlockStore
store = BlockStore.look(Path(sys.argv[1]))
print([one.conversation for one in store.entries()], store.usage().blocks, store.forget("c").blocks)
store.gc()
store.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=60)
    assert done.stdout == "['c', 'd'] 6 4\n", done.stdout + done.stderr
    store = open_store(folder)
    assert store.usage().block_bytes == 2 * SLOT
    assert isinstance(store.walk(text(words(100, 1)), FULL), Found)
    store.close()


def test_everything_is_for_the_owner_only(folder):
    """Conversations are private: the folder is 0700, each file in it 0600."""
    store = open_store(folder)
    save(store, text(words(200)), conversation="c")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    store.close()


def test_a_catalogue_of_a_newer_version_is_left_alone(folder):
    """A store that a newer version wrote is refused with the way out, and nothing in it changes."""
    open_store(folder).close()
    base = sqlite3.connect(folder / NAME)
    base.execute("INSERT INTO migrations VALUES ('0099_later', 0)")
    base.commit()
    base.close()
    with pytest.raises(StateBroken, match="0099_later"):
        open_store(folder)
    with pytest.raises(StateBroken):  # and the lock is free again
        open_store(folder)


def test_links_in_the_folder_are_not_followed(folder, tmp_path):
    """A link where a file of slots would lie is not written through."""
    target = tmp_path / "elsewhere"
    target.write_bytes(b"untouched")
    open_store(folder).close()
    (folder / f"{SLOT}-000000.slots").symlink_to(target)
    store = open_store(folder)
    prefix = text(words(64))
    done = store.put(prefix, 0, "full", FULL["full"], [b"x" * 20_000, b"y" * 8192])
    assert "cannot be written" in done.reason
    assert target.read_bytes() == b"untouched"
    store.close()


def test_leftover_files_and_slots_go(folder):
    """Files of slots that nothing names, and slots that nobody's block lies in, are given back at the start."""
    store = open_store(folder)
    save(store, text(words(200)), conversation="c")
    save(store, text(words(200, 1)), conversation="d")
    store.close()
    (folder / "4096-000007.slots").write_bytes(b"x" * 40_960)
    (path,) = folder.glob(f"{SLOT}-*.slots")
    base = sqlite3.connect(folder / NAME)
    base.execute("DELETE FROM turns WHERE conversation = 'c'")
    base.commit()
    base.close()
    with open(path, "ab") as file:
        file.write(b"x" * 3 * SLOT)
    again = open_store(folder)
    assert again.usage().block_bytes == 4 * SLOT
    assert path.stat().st_blocks * 512 <= 4 * SLOT + 4096
    assert list(folder.glob("*.slots")) == [path]
    check_account(again, folder)
    assert again.walk(text(words(200, 1)), FULL).length == 200
    again.close()


def test_a_catalogue_that_cannot_be_opened_now_is_not_damage(folder, monkeypatch):
    """A full disk or a missing right is told as such; the catalogue stays in its place, and serves later."""
    store = open_store(folder)
    save(store, text(words(100)), conversation="c")
    store.close()

    def full(connection, *rest):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr("pagein.kv.disk.catalogue.migrate", full)
    with pytest.raises(OSError, match="disk is full"):
        open_store(folder)
    monkeypatch.undo()
    store = open_store(folder)
    assert store.walk(text(words(100)), FULL).length == 100
    store.close()


def test_the_order_of_leaving_outlives_a_kill(folder):
    """When conversations were last used is known after a restart: of a killed process, as of their last turns."""
    clock = Clock()
    store = open_store(folder, clock)
    for at in range(4):
        clock.now += 100
        save(store, text(words(64, at)), conversation=f"c{at}")
    clock.now += 100
    store.note_turn("c0", text(words(64, 0)))
    os.close(store._guard)  # as if it were killed: nothing is written at the end
    again = open_store(folder, clock)
    assert [one.conversation for one in again.entries()] == ["c0", "c3", "c2", "c1"]
    order = sorted((node.used, node.key) for node in again._tree.leaves)
    assert [key for _, key in order] == [text(words(64, at)).links[0].key for at in (1, 2, 3, 0)]
    again.close()
