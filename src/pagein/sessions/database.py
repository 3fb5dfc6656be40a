"""The file: opened safely, written by one thread in one queue, read by a few others at the same time.

Write-ahead log and `synchronous=FULL`: once a write has returned, neither a killed process nor a power cut undoes it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pagein.errors import HistoryFull, StateBroken
from pagein.sessions.schema import FromTheFuture, migrate

T = TypeVar("T")
log = logging.getLogger(__name__)

_READERS = 2
_BUSY_SECONDS = 5.0
"""How long a write waits for another process that has the file open (a backup)."""
_WAL_BYTES = 4 * 1024**2
"""The log is cut back to this after each checkpoint."""
_GIVEN_BACK = 2000
"""Free pages that are given back to the disk after one write."""
_DAMAGE = ("not a database", "malformed", "unsupported file format")
_FULL = "full"


class Database:
    """One file of SQLite; every method but `open` belongs to the event loop."""

    def __init__(self, path: Path, writer: sqlite3.Connection) -> None:
        self._path = path
        self._connection = writer
        self._writing = ThreadPoolExecutor(1, "sessions-write")
        self._reading = ThreadPoolExecutor(_READERS, "sessions-read")
        self._readers = threading.local()
        self._opened: list[sqlite3.Connection] = []

    @classmethod
    def open(cls, path: Path) -> Database:
        """Open or create the file, readable by its owner only; a damaged one is moved aside and begun anew.

        Raises StateBroken where it cannot be opened: the daemon then does not start, instead of forgetting in silence.
        """
        try:
            try:
                return cls(path, _open_file(path))
            except sqlite3.DatabaseError as error:
                if not any(sign in str(error) for sign in _DAMAGE):
                    raise
                aside = _move_aside(path)
                log.error("the conversations in %s are damaged (%s); moved to %s, beginning anew", path, error, aside)
                return cls(path, _open_file(path))
        except FromTheFuture as error:
            raise StateBroken(
                f"the conversations in {path} were written by a newer version (it has {error})",
                hint="use that version, or move the file away",
            ) from None
        except (sqlite3.Error, OSError) as error:
            raise _broken(path, error) from error

    async def write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` in a transaction of its own, after all writes before it; durable once this returns."""
        return await asyncio.get_running_loop().run_in_executor(self._writing, self._write, work)

    async def read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run ``work`` on one consistent state of the file, beside any write."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._read, work)

    async def scrub(self) -> None:
        """Take deleted text out of the log too, and give free pages back to the disk."""
        await asyncio.get_running_loop().run_in_executor(self._writing, self._scrub)

    def scrub_later(self) -> None:
        """The same, before the next write, with nobody waiting for it."""
        self._writing.submit(self._scrub)

    def close(self) -> None:
        """End the threads, after the writes that were asked for, and close the file."""
        self._writing.shutdown()
        self._reading.shutdown()
        for connection in (*self._opened, self._connection):
            connection.close()

    def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        connection = self._connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise _told(self._path, error) from error
        return result

    def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        try:
            connection = getattr(self._readers, "connection", None)
            if connection is None:
                connection = self._readers.connection = _connect(self._path)
                connection.execute("PRAGMA query_only = ON")
                self._opened.append(connection)
            connection.execute("BEGIN")
            try:
                return work(connection)
            finally:
                connection.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise _told(self._path, error) from error

    def _scrub(self) -> None:
        try:
            self._connection.execute(f"PRAGMA incremental_vacuum({_GIVEN_BACK})").fetchall()
            self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        except sqlite3.Error as error:  # what was deleted is deleted; only its place comes back later
            log.warning("the file %s could not be tidied: %s", self._path, error)


def used_bytes(connection: sqlite3.Connection) -> int:
    """Bytes of the file's pages that hold something; inside a transaction as that has left them."""
    pages, free, size = (
        connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
    )
    return int((pages - free) * size)


def _open_file(path: Path) -> sqlite3.Connection:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    os.chmod(path, 0o600)  # SQLite gives its journal files the same mode
    connection = _connect(path)
    try:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")  # before the first table, or never
        connection.execute("PRAGMA journal_mode = WAL").fetchone()
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON").fetchone()
        connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}").fetchone()
        migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


def _move_aside(path: Path) -> Path:
    """Rename a damaged file, with its log, so that it can still be looked at."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.replace(aside.with_name(aside.name + suffix))
    return aside


def _told(path: Path, error: sqlite3.Error) -> HistoryFull | StateBroken:
    if isinstance(error, sqlite3.OperationalError) and _FULL in str(error):
        return HistoryFull(
            f"the disk of {path} is full: the turn was not stored",
            hint="free some space, or delete conversations with 'pagein state rm'",
        )
    return _broken(path, error)


def _broken(path: Path, error: Exception) -> StateBroken:
    return StateBroken(
        f"the conversations in {path} cannot be used: {error}",
        hint="see to the file, or switch conversations off with state.enabled: false",
    )
