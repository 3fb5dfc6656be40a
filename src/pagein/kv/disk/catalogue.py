"""The catalogue: a SQLite file of what the slots hold. Read once, when the store opens; written with every change.

Write-ahead log and `synchronous=NORMAL`, which syncs at checkpoints only: a power cut may undo the last changes or
leave rows whose bytes never came to the disk. Both are found out: every byte is verified when it is read, every row
when the store opens. So no put waits for a sync. A killed process loses nothing that was committed.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from pathlib import Path

from pagein.errors import StateBroken
from pagein.kv.disk.changes import Changes, Row
from pagein.kv.disk.schema import KEYS, WIDTH, FromTheFuture, migrate, seal

log = logging.getLogger(__name__)

NAME = "catalogue.sqlite"
_BUSY_SECONDS = 5.0
_LOG_WRITES = 32
"""After so many the log is taken into the file, by whoever put last, beside the others: some 6 pages each."""
_LOG_PAGES = 1024
"""The same in the middle of a commit, where that did not come about."""
_LOG_BYTES = 1024**2
"""The log is cut back to this."""
_DAMAGE = ("not a database", "malformed", "unsupported file format")
_GIVEN_BACK = 1000
"""Free pages that are given back to the disk at once."""


class Catalogue:
    """One file of SQLite. The store's lock guards all methods but `shorten`."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        self._shortening = threading.Lock()
        self._writes = 0
        self.damaged = not _is_sound(connection)
        self._second: sqlite3.Connection | None = None

    @classmethod
    def open(cls, path: Path) -> Catalogue:
        """Open or make the file, readable by its owner only; a damaged one is moved aside, and the store is empty.

        Raises StateBroken where a newer version wrote it, OSError where it cannot be used.
        """
        try:
            try:
                return cls(path, _open_file(path))
            except sqlite3.DatabaseError as error:
                if isinstance(error, sqlite3.OperationalError) and not any(sign in str(error) for sign in _DAMAGE):
                    raise  # a full disk, say: the file is as good as before
                log.error("the catalogue %s is damaged (%s): moved aside, the store begins empty", path, error)
                _move_aside(path)
                return cls(path, _open_file(path))
        except FromTheFuture as error:
            raise StateBroken(
                f"the KV blocks in {path.parent} were written by a newer version (it has {error})",
                hint="use that version, or remove the folder: only time is lost",
            ) from None
        except sqlite3.Error as error:
            raise OSError(f"the catalogue {path} cannot be used: {error}") from error

    def rows(self, table: str) -> list[Row]:
        """The rows of a table whose seal holds, without it; `damaged` tells afterwards whether there were others."""
        found: list[Row] = []
        try:
            for *row, mark in self._connection.execute(f"SELECT * FROM {table}"):  # noqa: S608 (names of this package)
                if seal(table, row) == mark:
                    found.append(tuple(row))
                else:
                    self.damaged = True
        except sqlite3.DatabaseError:  # a page that is none, a text that is none
            self.damaged = True
        return found

    def renew(self) -> Catalogue:
        """Move the file aside and begin a new one, for what was sound in it."""
        log.error("the catalogue %s is damaged: what is sound in it goes on in a new one", self._path)
        self.close()
        _move_aside(self._path)
        return Catalogue.open(self._path)

    def used(self) -> dict[bytes, float]:
        """When nodes were last used."""
        try:
            rows = self._connection.execute("SELECT key, at FROM used").fetchall()
        except sqlite3.DatabaseError:
            self.damaged = True
            return {}
        return {key: at for key, at in rows if isinstance(at, float)}

    def write(self, changes: Changes) -> None:
        """Write changes in one transaction; sqlite3.Error where that fails, and nothing of it is written."""
        connection = self._connection
        self._writes += 1
        with connection:
            connection.execute("BEGIN IMMEDIATE")
            for table, columns in KEYS.items():
                rows: dict[Row, Row | None] = getattr(changes, table)
                where = " AND ".join(f"{column} = ?" for column in columns)
                # Those that come first go, too: two of them may change places, and a slot has one block at any time.
                connection.executemany(f"DELETE FROM {table} WHERE {where}", rows)  # noqa: S608
            for table in KEYS:
                rows = getattr(changes, table)
                new = [(*row, seal(table, row)) for row in rows.values() if row is not None]
                places = ", ".join("?" * (WIDTH[table] + 1))
                connection.executemany(f"INSERT INTO {table} VALUES ({places})", new)  # noqa: S608
            connection.executemany("DELETE FROM used WHERE key = ?", [k for k, v in changes.nodes.items() if v is None])
            connection.executemany("INSERT OR REPLACE INTO used VALUES (?, ?)", changes.used.items())

    def shorten(self) -> None:
        """Take a long log into the file, beside whoever writes: that syncs, and nobody should wait for it."""
        if self._writes < _LOG_WRITES or not self._shortening.acquire(blocking=False):
            return
        try:
            self._writes = 0
            self._second = self._second or _connect(self._path)
            self._second.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        except sqlite3.Error as error:
            log.warning("the catalogue %s could not be tidied: %s", self._path, error)
        finally:
            self._shortening.release()

    def scrub(self) -> None:
        """Take deleted text out of the log, too, and give free pages back; sqlite3.Error where that fails."""
        with self._shortening:
            self._connection.execute(f"PRAGMA incremental_vacuum({_GIVEN_BACK})").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def close(self) -> None:
        """Close the file."""
        with self._shortening:
            if self._second is not None:
                self._second.close()
        self._connection.close()


def _open_file(path: Path) -> sqlite3.Connection:
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.chmod(path, 0o600)  # SQLite gives its journal files the same mode
    connection = _connect(path)
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table, or never
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA secure_delete = ON").fetchone()
        connection.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}").fetchone()
        connection.execute(f"PRAGMA wal_autocheckpoint = {_LOG_PAGES}").fetchone()
        migrate(connection)
        for table, width in WIDTH.items():
            if len(connection.execute(f"PRAGMA table_info({table})").fetchall()) != width + 1:
                raise sqlite3.DatabaseError(f"the table {table} is not what its name says")
    except BaseException:
        connection.close()
        raise
    return connection


def _is_sound(connection: sqlite3.Connection) -> bool:
    try:
        return bool(connection.execute("PRAGMA integrity_check(1)").fetchone()[0] == "ok")
    except sqlite3.DatabaseError:
        return False


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _move_aside(path: Path) -> None:
    """Rename a damaged file, with its log, so that it can be looked at; an older one of the kind goes."""
    for old in path.parent.glob(f"{path.name}*.damaged-*"):
        old.unlink()
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(part.with_name(f"{part.name}.damaged-{time.time_ns()}"))
