"""Migrations by name, and files that are damaged, foreign or newer."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from pagein.errors import StateBroken
from pagein.sessions.schema import MIGRATIONS, FromTheFuture, migrate
from tests.sessions.conftest import Open, spoken

ME = "tenant-a"


def connect(path: Path | str = ":memory:") -> sqlite3.Connection:
    return sqlite3.connect(path, isolation_level=None)


def test_each_migration_is_applied_once():
    """A second run applies nothing, a new name only itself."""
    connection = connect()
    assert migrate(connection) == list(MIGRATIONS)
    assert migrate(connection) == []
    more = {**MIGRATIONS, "0099_more": ("CREATE TABLE more (x)",)}
    assert migrate(connection, more) == ["0099_more"]


def test_a_migration_that_fails_leaves_nothing():
    """Its first statement is taken back with the others, and the migrations before it stay."""
    connection = connect()
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, {"a": ("CREATE TABLE a (x)",), "b": ("CREATE TABLE b (x)", "NONSENSE")})
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    assert "a" in tables
    assert "b" not in tables
    assert migrate(connection, {"a": ("CREATE TABLE a (x)",), "b": ("CREATE TABLE b (x)",)}) == ["b"]


def test_a_newer_file_is_refused():
    """A file with a migration that is not known here is left as it is."""
    connection = connect()
    migrate(connection, {"zzzz_later": ("CREATE TABLE later (x)",)})
    with pytest.raises(FromTheFuture, match="zzzz_later"):
        migrate(connection)
    assert {row[0] for row in connection.execute("SELECT name FROM migrations")} == {"zzzz_later"}


async def test_an_older_file_keeps_its_conversations(open_store: Open, tmp_path: Path) -> None:
    """A file of the first migrations gets the missing ones, and its rows stay."""
    path = tmp_path / "state" / "c.sqlite"
    path.parent.mkdir()
    first = dict(list(MIGRATIONS.items())[:1])
    connection = connect(path)
    migrate(connection, first)
    row = ("sess_1", ME, "session", "talk", "m", 1.0, 1.0, "{}", 0, 0)
    connection.execute(f"INSERT INTO threads VALUES ({', '.join('?' * len(row))})", row)
    connection.close()
    store = open_store()
    assert (await store.find(ME, "talk")).id == "sess_1"
    await store.keep(ME, spoken("talk", "sess_1", "q", "a"))


async def test_a_newer_file_stops_the_start(open_store: Open, tmp_path: Path) -> None:
    """The daemon does not start on a file that it cannot read, instead of forgetting in silence."""
    path = tmp_path / "state" / "c.sqlite"
    open_store().close()
    connection = connect(path)
    connection.execute("INSERT INTO migrations VALUES ('9999_later', 0)")
    connection.close()
    with pytest.raises(StateBroken, match="9999_later"):
        open_store()


async def test_a_damaged_file_is_moved_aside(open_store: Open, tmp_path: Path) -> None:
    """What is no database is kept under another name, and a new one is begun."""
    path = tmp_path / "state" / "c.sqlite"
    path.parent.mkdir()
    path.write_bytes(b"this is no database at all" * 100)
    store = open_store()
    await store.keep(ME, spoken("talk", None, "q", "a"))
    (aside,) = path.parent.glob("c.sqlite.damaged-*")
    assert aside.read_bytes().startswith(b"this is no database")


def test_a_link_is_not_followed(open_store: Open, tmp_path: Path) -> None:
    """A link in the place of the file is refused."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "c.sqlite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StateBroken):
        open_store()
    assert not (tmp_path / "elsewhere").exists()
