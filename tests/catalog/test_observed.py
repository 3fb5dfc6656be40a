"""The store of remembered peaks."""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from pathlib import Path

import pytest

from pagein.catalog.identity import Stamp
from pagein.catalog.observed import PeakStore
from tests.catalog.build import write


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the store will be."""
    return tmp_path / "state" / "peaks.sqlite"


def test_a_peak_only_grows_and_survives_a_restart(path: Path) -> None:
    """Per pool the highest figure counts; the last load's time and the number of observations are kept."""
    store = PeakStore.open(path)
    store.remember("k", "chat", {"ram": 100}, 2.5, in_use=False)
    store.remember("k", "chat", {"ram": 300, "cuda:0": 50})
    store.remember("k", "chat-2", {"ram": 200}, 1.5, in_use=False)
    store.close()
    seen = PeakStore.open(path).peak("k")
    assert seen is not None
    assert seen.used == {"ram": 300, "cuda:0": 50}
    assert (seen.model, seen.load_seconds, seen.samples, seen.in_use) == ("chat-2", 1.5, 3, True)
    assert seen.first_seen <= seen.last_seen


def test_a_load_alone_is_not_use(path: Path) -> None:
    """Whether the model has served is remembered, since a load shows too little."""
    store = PeakStore.open(path)
    assert not store.remember("k", "chat", {"ram": 100}, in_use=False).in_use
    assert store.remember("k", "chat", {"ram": 100}).in_use


def test_unknown_keys_and_all_rows(path: Path) -> None:
    """A key that was never seen is None; rows come last seen first."""
    store = PeakStore.open(path)
    assert store.peak("k") is None
    for key in ("a", "b"):
        store.remember(key, key, {"ram": 1})
    assert {row.key for row in store.rows()} == {"a", "b"}
    assert store.rows()[0].last_seen >= store.rows()[1].last_seen


def test_only_the_owner_reads_it(path: Path) -> None:
    """File, journal and folder are closed to others, also where an older file was open."""
    store = PeakStore.open(path)
    store.remember("k", "chat", {"ram": 1})
    for file in path.parent.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    store.close()
    os.chmod(path, 0o644)
    PeakStore.open(path).close()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", ["noise", "middle", "tables"])
def test_a_damaged_store_is_moved_aside(path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    """It starts anew with a warning, and nothing is deleted."""
    store = PeakStore.open(path)
    for number in range(200):
        store.remember(f"key-{number}", "chat", {"ram": number})
    store.close()
    if damage == "noise":
        write(path, b"not a database at all" * 99)
    elif damage == "middle":
        data = bytearray(path.read_bytes())
        data[4096:12288] = b"\x5a" * 8192
        write(path, bytes(data))
    else:
        with sqlite3.connect(path) as connection:
            connection.execute("DROP TABLE peaks")
    with caplog.at_level(logging.WARNING):
        again = PeakStore.open(path)
    assert "damaged" in caplog.text
    assert again.rows() == []
    again.remember("k", "chat", {"ram": 1})
    assert len(list(path.parent.glob("peaks.sqlite.damaged-*"))) >= 1
    again.close()
    assert PeakStore.open(path).peak("k") is not None


def test_a_place_that_cannot_be_written_is_memory_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The daemon runs on; what it learns lasts until it ends."""
    write(tmp_path / "state", "a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        store = PeakStore.open(tmp_path / "state" / "peaks.sqlite")
    store.remember("k", "chat", {"ram": 1})
    assert store.peak("k") is not None
    assert "in memory only" in caplog.text


def test_a_failed_write_is_a_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A store that another process holds, or a full disk, costs the figure on disk and not the daemon."""
    store = PeakStore.open(path)
    store.close()
    with caplog.at_level(logging.WARNING):
        store.remember("k", "chat", {"ram": 7})
    assert "was not written" in caplog.text
    seen = store.peak("k")
    assert seen is not None
    assert seen.used == {"ram": 7}


def test_two_processes_share_the_file(path: Path) -> None:
    """A command line beside the daemon opens the same store; migrations are applied once."""
    daemon, command = PeakStore.open(path), PeakStore.open(path)
    daemon.remember("k", "chat", {"ram": 1})
    command.remember_digest(Stamp("/m", 1, 2, 3), "d")
    daemon.close()
    command.close()
    again = PeakStore.open(path)
    assert again.peak("k") is not None
    assert again.cached_digest(Stamp("/m", 1, 2, 3)) == "d"


def test_digests_follow_the_file(path: Path) -> None:
    """A changed file is unknown until it was hashed again; the old digest is dropped."""
    store = PeakStore.open(path)
    old, new = Stamp("/m", 1, 2, 3), Stamp("/m", 1, 9, 3)
    store.remember_digest(old, "a")
    assert store.cached_digest(new) is None
    store.remember_digest(new, "b")
    assert store.cached_digest(old) is None
    store.close()
    assert PeakStore.open(path).cached_digest(new) == "b"
