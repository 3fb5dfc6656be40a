"""A block store that no worker has: what the daemon takes out of it, on a real one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("xxhash")

from pagein.daemon.idle_store import Busy, bytes_of, check, forget_in, thin_out
from pagein.errors import StateBroken
from pagein.history import Gone, new_id
from pagein.kv.blocks.keys import ROOT_FIELDS, root_key
from pagein.kv.disk.answers import Policy
from pagein.kv.disk.prefix import Prefix
from pagein.kv.disk.store import BlockStore

CAP = 64 * 1024**2
BLOCK = bytes(8192)
MINE, THEIRS = new_id("conv"), new_id("sess")


def keep(store: BlockStore, conversation: str, tenant: str, first: int) -> None:
    """Put the two blocks of a text, and say whose they are."""
    prefix = Prefix.of(
        root_key({**dict.fromkeys(ROOT_FIELDS, "x"), "tenant": tenant}),
        range(first, first + 128),
        tenant=tenant,
        model="m",
    )
    for index in range(2):
        store.put(prefix, index, "full", Policy.every(), [BLOCK])
    store.note_turn(conversation, prefix)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three conversations of two tenants; the one without an id of the daemon's is known by its tokens only."""
    store = BlockStore.open(tmp_path / "m", cap=CAP, floor=0)
    keep(store, MINE, "t", 0)
    keep(store, THEIRS, "u", 1000)
    keep(store, "unnamed", "t", 2000)
    store.close()
    return tmp_path / "m"


def there(folder: Path) -> set[str]:
    """The conversations of a store."""
    store = BlockStore.look(folder)
    assert store is not None
    found = {one.conversation for one in store.entries()}
    store.close()
    return found


def test_a_conversation_is_forgotten_by_tenant_and_id(folder):
    """Its blocks leave the disk; the same id of another tenant is another conversation."""
    assert forget_in(folder, {Gone("u", MINE)}).conversations == 0
    left = forget_in(folder, {Gone("t", MINE)})
    assert (left.conversations, left.bytes) == (1, 2 * 8192)
    assert there(folder) == {THEIRS, "unnamed"}


def test_what_the_history_does_not_know_is_forgotten(folder):
    """After a crash between two deletions; what never was a kept conversation stays."""
    assert forget_in(folder, None, {Gone("u", THEIRS)}).conversations == 1
    assert there(folder) == {THEIRS, "unnamed"}


def test_old_ones_are_thinned_out(folder):
    """Not used for so long; all of it where nothing is said."""
    assert thin_out(folder, CAP, 1e6).conversations == 0
    assert thin_out(folder, CAP, 0.0).conversations == 3
    assert there(folder) == set()
    assert thin_out(folder, CAP, None).bytes > 0
    assert not folder.exists()


def test_a_store_in_use_is_left_alone(folder):
    """A worker has it: nothing is removed."""
    store = BlockStore.look(folder)
    for act in (lambda: forget_in(folder, {Gone("t", MINE)}), lambda: thin_out(folder, CAP, None)):
        with pytest.raises(Busy):
            act()
    assert store is not None
    store.close()
    assert MINE in there(folder)


def test_what_cannot_be_read_goes_whole(folder, monkeypatch):
    """Nothing that was deleted may stay because its store is broken, or because what reads it was uninstalled."""
    kept = shutil.copytree(folder, folder.with_name("n"))
    for file in folder.glob("*.sqlite*"):
        file.write_bytes(b"no catalogue" * 1000)
    forget_in(folder, {Gone("t", MINE)})
    assert not folder.exists() or MINE not in there(folder)
    monkeypatch.setitem(sys.modules, "pagein.kv.disk.store", None)
    forget_in(kept, {Gone("t", MINE)})
    assert not kept.exists()


def test_no_store_is_no_fault(tmp_path):
    """Nothing is made either."""
    assert forget_in(tmp_path / "x", {Gone("t", MINE)}).conversations == 0
    assert thin_out(tmp_path / "x", CAP, None).conversations == 0
    assert bytes_of(tmp_path / "x") == 0
    assert not (tmp_path / "x").exists()


def spoil(folder: Path, block: int = 1) -> None:
    """Damage a block of a store that nobody has open."""
    with open(next(folder.glob("*.slots")), "r+b") as file:
        file.seek(block * 8192 + 77)
        file.write(b"damage")


def test_a_store_is_read_through(folder):
    """Every block, and what is damaged goes; what is not there is whole."""
    assert check(folder, None) == {"checked": 6, "bytes": 6 * 8192, "faults": [], "left": 0, "next": None}
    spoil(folder)
    told = check(folder, None)
    assert (told["checked"], len(told["faults"])) == (6, 1)
    assert "is not what was written" in told["faults"][0][1]
    assert check(folder, None)["checked"] == 5
    assert check(folder.with_name("none"), None)["checked"] == 0
    with pytest.raises(ValueError, match="goes on"):
        check(folder, "somewhere")


def test_what_cannot_be_read_through_stays(folder, monkeypatch):
    """A worker has it, or what reads it is not installed: it is said, and nothing is removed."""
    store = BlockStore.look(folder)
    with pytest.raises(Busy, match="in use by process"):
        check(folder, None)
    assert store is not None
    store.close()
    monkeypatch.setitem(sys.modules, "pagein.kv.disk.checking", None)
    with pytest.raises(StateBroken, match="not installed"):
        check(folder, None)
    assert MINE in there(folder)
