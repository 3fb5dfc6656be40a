"""Remembered peaks: what each model really took, kept across starts in SQLite (rule 2).

A key stands for a model under given settings on a given engine version (`resolve.peak_key`), so a peak is simply the
highest figure ever seen for its key: a new engine version starts a new key. One process writes, the daemon; every read
is answered from memory, so nothing here blocks on the disk but `remember`. A fault of the file is never a fault of the
daemon: a damaged one is moved aside and begun anew, a full disk is logged and the figures live on in memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pagein.catalog.identity import Stamp

log = logging.getLogger(__name__)

BUSY_SECONDS = 2.0
"""How long a write waits for another process (`pagein check`) that writes digests."""
MIGRATIONS: dict[str, tuple[str, ...]] = {
    "0001_peaks": (
        """CREATE TABLE models (
            key TEXT PRIMARY KEY, name TEXT NOT NULL, load_seconds REAL, samples INTEGER NOT NULL,
            in_use INTEGER NOT NULL, first_seen REAL NOT NULL, last_seen REAL NOT NULL
        )""",
        "CREATE TABLE peaks (key TEXT, pool TEXT, bytes INTEGER NOT NULL, PRIMARY KEY (key, pool))",
    ),
    "0002_digests": (
        """CREATE TABLE digests (
            path TEXT PRIMARY KEY, size INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, inode INTEGER NOT NULL,
            digest TEXT NOT NULL
        )""",
    ),
}
"""Statements by name, in order; what was applied under a name is never changed."""
_ROWS = "SELECT key, name, load_seconds, samples, in_use, first_seen, last_seen FROM models"
_PUT_MODEL = "INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, ?, ?, ?)"
_PUT_PEAK = "INSERT OR REPLACE INTO peaks VALUES (?, ?, ?)"
_PUT_DIGEST = "INSERT OR REPLACE INTO digests VALUES (?, ?, ?, ?, ?)"


@dataclass(frozen=True, slots=True)
class Observed:
    """What was seen of one key."""

    key: str
    model: str
    """The name that the model had when it was last seen; for people."""
    used: Mapping[str, int]
    """Highest bytes per pool that were ever measured."""
    load_seconds: float | None
    """What the last measured load took."""
    samples: int
    in_use: bool
    """True once it was seen while it served; until then the peak is that of a load only, a lower bound."""
    first_seen: float
    last_seen: float
    """Seconds since the epoch."""


class PeakStore:
    """The store. Use `open`; a reload resolves models in another thread, so writes take turns."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()
        self._seen: dict[str, Observed] = {}
        self._digests: dict[Stamp, str] = {}
        self._load()

    @classmethod
    def open(cls, path: Path) -> PeakStore:
        """Open or create the store, readable by its owner only; never raises for what is wrong with the file."""
        try:
            return cls._open_file(path)
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                log.warning("remembered peaks in %s cannot be used: %s; they are kept in memory only", path, error)
                return cls(_connect(":memory:"))
            aside = _move_aside(path)
            log.warning("remembered peaks in %s are damaged (%s); moved to %s, starting anew", path, error, aside)
        except OSError as error:
            log.warning("remembered peaks in %s cannot be used: %s; they are kept in memory only", path, error)
            return cls(_connect(":memory:"))
        try:
            return cls._open_file(path)
        except (sqlite3.DatabaseError, OSError) as error:
            log.warning("remembered peaks in %s cannot be begun anew: %s; they are kept in memory only", path, error)
            return cls(_connect(":memory:"))

    @classmethod
    def _open_file(cls, path: Path) -> PeakStore:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        os.chmod(path, 0o600)  # SQLite gives its journal files the same mode
        connection = _connect(str(path))
        try:
            return cls(connection)
        except BaseException:
            connection.close()
            raise

    def peak(self, key: str) -> Observed | None:
        """Return what was seen of a key, or None."""
        return self._seen.get(key)

    def remember(
        self,
        key: str,
        model_name: str,
        used: Mapping[str, int],
        load_seconds: float | None = None,
        *,
        in_use: bool = True,
    ) -> Observed:
        """Add an observation; a peak only grows. Blocks for one small write; never raises for a fault of the file.

        ``in_use`` is False for the figures of a load after which the model did not serve.
        """
        now = time.time()
        old = self._seen.get(key) or Observed(key, model_name, {}, None, 0, False, now, now)
        new = replace(
            old,
            model=model_name,
            used={**old.used, **{pool: max(size, old.used.get(pool, 0)) for pool, size in used.items()}},
            load_seconds=old.load_seconds if load_seconds is None else load_seconds,
            samples=old.samples + 1,
            in_use=old.in_use or in_use,
            last_seen=now,
        )
        self._seen[key] = new
        row = (key, new.model, new.load_seconds, new.samples, new.in_use, new.first_seen, new.last_seen)
        peaks = [
            ("INSERT OR REPLACE INTO peaks VALUES (?, ?, ?)", (key, pool, size)) for pool, size in new.used.items()
        ]
        self._write([("INSERT OR REPLACE INTO models VALUES (?, ?, ?, ?, ?, ?, ?)", row), *peaks])
        return new

    def rows(self) -> list[Observed]:
        """Everything that is remembered, the last seen first."""
        return sorted(self._seen.values(), key=lambda row: (-row.last_seen, row.key))

    def cached_digest(self, stamp: Stamp) -> str | None:
        """Return the digest of a file that has not changed since it was hashed, or None."""
        return self._digests.get(stamp)

    def remember_digest(self, stamp: Stamp, digest: str) -> None:
        """Keep the digest of a file in place of an older one."""
        self._digests = {old: text for old, text in self._digests.items() if old.path != stamp.path}
        self._digests[stamp] = digest
        values = (stamp.path, stamp.size, stamp.mtime_ns, stamp.inode, digest)
        self._write([(_PUT_DIGEST, values)])

    def close(self) -> None:
        """Close the file; idempotent."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.close()

    def _load(self) -> None:
        peaks: dict[str, dict[str, int]] = {}
        for key, pool, size in self._connection.execute("SELECT key, pool, bytes FROM peaks"):
            peaks.setdefault(key, {})[pool] = size
        for key, name, seconds, samples, in_use, first, last in self._connection.execute(_ROWS):
            self._seen[key] = Observed(key, name, peaks.get(key, {}), seconds, samples, bool(in_use), first, last)
        for path, size, mtime_ns, inode, digest in self._connection.execute("SELECT * FROM digests"):
            self._digests[Stamp(path, size, mtime_ns, inode)] = digest

    def _write(self, statements: list[tuple[str, tuple[object, ...]]]) -> None:
        """One transaction; what cannot be written is logged, and forgotten at the next start."""
        try:
            with self._lock, self._connection:
                for statement, values in statements:
                    self._connection.execute(statement, values)
        except sqlite3.Error as error:
            log.warning("a remembered figure was not written: %s", error)


def _connect(target: str) -> sqlite3.Connection:
    connection = sqlite3.connect(target, timeout=BUSY_SECONDS, check_same_thread=False)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        fault = connection.execute("PRAGMA quick_check").fetchone()[0]
        if fault != "ok":
            raise sqlite3.DatabaseError(f"damaged: {fault}")
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    """Apply what is missing, all or nothing; a second process that starts meanwhile waits and finds it done."""
    connection.execute("BEGIN IMMEDIATE")
    connection.execute("CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied REAL NOT NULL)")
    done = {name for (name,) in connection.execute("SELECT name FROM migrations")}
    for name, statements in MIGRATIONS.items():
        if name in done:
            continue
        for statement in statements:
            connection.execute(statement)
        connection.execute("INSERT INTO migrations VALUES (?, ?)", (name, time.time()))
    connection.commit()


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Tell a damaged file from one that is locked, on a full disk or not permitted."""
    if not isinstance(error, sqlite3.OperationalError):
        return True
    return "no such" in str(error) or "malformed" in str(error)


def _move_aside(path: Path) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            os.replace(f"{path}{suffix}", f"{aside}{suffix}")
    return aside
