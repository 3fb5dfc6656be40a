"""The catalogue's tables: migrations by name, each applied whole or not at all; and the seal of a row."""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Mapping, Sequence

from pagein.kv.disk.changes import Value

MIGRATIONS: dict[str, tuple[str, ...]] = {
    "0001_blocks": (
        "CREATE TABLE roots (key BLOB PRIMARY KEY, tenant TEXT, model TEXT, seal BLOB) WITHOUT ROWID",
        "CREATE TABLE nodes (key BLOB PRIMARY KEY, parent BLOB, tokens BLOB, seal BLOB) WITHOUT ROWID",
        """CREATE TABLE blocks (
            key BLOB, grp TEXT, kind INTEGER, window INTEGER, form TEXT, lengths TEXT, digests BLOB,
            slot_bytes INTEGER, segment INTEGER, slot INTEGER, seconds REAL, seal BLOB, PRIMARY KEY (key, grp)
        ) WITHOUT ROWID""",
        "CREATE UNIQUE INDEX blocks_by_slot ON blocks (slot_bytes, segment, slot)",
        """CREATE TABLE turns (
            tenant TEXT, conversation TEXT, key BLOB, at REAL, seal BLOB, PRIMARY KEY (tenant, conversation, key)
        ) WITHOUT ROWID""",
        "CREATE TABLE used (key BLOB PRIMARY KEY, at REAL) WITHOUT ROWID",
    ),
}
"""Statements by name, in order; what was applied under a name is never changed."""
KEYS = {"roots": ("key",), "nodes": ("key",), "blocks": ("key", "grp"), "turns": ("tenant", "conversation", "key")}
"""Sealed tables and what names a row."""
WIDTH = {"roots": 3, "nodes": 3, "blocks": 11, "turns": 4}
"""Columns without the seal."""
_APPLIED = "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied REAL NOT NULL)"


class FromTheFuture(Exception):
    """The file was written by a newer version; its migrations that are not known here are the argument."""


def migrate(connection: sqlite3.Connection, migrations: Mapping[str, Sequence[str]] = MIGRATIONS) -> None:
    """Apply what is missing; FromTheFuture, with nothing changed, where there is something that is not known here."""
    connection.execute(_APPLIED)
    applied = {row[0] for row in connection.execute("SELECT name FROM migrations")}
    if unknown := sorted(applied - migrations.keys()):
        raise FromTheFuture(", ".join(unknown))
    for name in migrations:
        if name not in applied:
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                for statement in migrations[name]:
                    connection.execute(statement)
                connection.execute("INSERT INTO migrations VALUES (?, ?)", (name, time.time()))


def seal(table: str, row: Sequence[Value]) -> bytes:
    """The digest of a row: SQLite has none, and a token that flipped on the disk would answer for another text."""
    return hashlib.blake2b(repr((table, *row)).encode(), digest_size=16).digest()
