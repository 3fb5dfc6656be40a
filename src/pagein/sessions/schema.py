"""Tables, and how an older file becomes one of this version: migrations by name, each applied whole or not at all."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping, Sequence

MIGRATIONS: dict[str, tuple[str, ...]] = {
    "0001_threads": (
        """CREATE TABLE threads (
            id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, name TEXT, model TEXT,
            created REAL NOT NULL, used REAL NOT NULL, metadata TEXT NOT NULL,
            bytes INTEGER NOT NULL, entries INTEGER NOT NULL
        )""",
        "CREATE UNIQUE INDEX threads_by_name ON threads (tenant, name) WHERE name IS NOT NULL",
        "CREATE INDEX threads_by_use ON threads (used)",
        "CREATE INDEX threads_by_tenant ON threads (tenant, used)",
    ),
    "0002_responses": (
        """CREATE TABLE responses (
            id TEXT PRIMARY KEY, thread TEXT NOT NULL REFERENCES threads ON DELETE CASCADE, previous TEXT,
            body TEXT NOT NULL
        )""",
        "CREATE INDEX responses_by_thread ON responses (thread)",
    ),
    "0003_entries": (
        """CREATE TABLE entries (
            seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL,
            thread TEXT NOT NULL REFERENCES threads ON DELETE CASCADE, response TEXT, shape TEXT NOT NULL,
            output INTEGER NOT NULL, body TEXT NOT NULL
        )""",
        "CREATE UNIQUE INDEX entries_by_id ON entries (thread, id)",
        "CREATE INDEX entries_by_thread ON entries (thread, seq)",
        "CREATE INDEX entries_by_response ON entries (response) WHERE response IS NOT NULL",
    ),
}
"""Statements by name, in order; what was applied under a name is never changed."""
_APPLIED = "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied REAL NOT NULL)"


class FromTheFuture(Exception):
    """The file was written by a newer version; its migrations that are not known here are the argument."""


def migrate(connection: sqlite3.Connection, migrations: Mapping[str, Sequence[str]] = MIGRATIONS) -> list[str]:
    """Apply what is missing and return its names; a crash leaves each migration applied or not begun.

    Raises FromTheFuture, and changes nothing then, since a newer file may mean something else by the same table.
    """
    connection.execute(_APPLIED)
    applied = {row[0] for row in connection.execute("SELECT name FROM migrations")}
    if unknown := sorted(applied - migrations.keys()):
        raise FromTheFuture(", ".join(unknown))
    missing = [name for name in migrations if name not in applied]
    for name in missing:
        _apply(connection, name, migrations[name])
    return missing


def _apply(connection: sqlite3.Connection, name: str, statements: Sequence[str]) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        for statement in statements:
            connection.execute(statement)
        connection.execute("INSERT INTO migrations VALUES (?, ?)", (name, time.time()))
        connection.execute("COMMIT")
    except BaseException:
        connection.execute("ROLLBACK")
        raise
