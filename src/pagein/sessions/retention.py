"""Bounds in age and bytes, kept inside the transaction that writes: whole conversations leave, last used first."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from pagein.errors import HistoryFull
from pagein.history import Gone
from pagein.sessions.database import used_bytes
from pagein.units import format_bytes

_AT_ONCE = 50
"""Conversations too old that leave with one write; the next write goes on."""
_SLACK = 32 * 1024
"""Bytes of index and half-filled pages that a turn may take beside its text."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How much is kept, and how long."""

    bytes: int
    """Of the whole file, with its indexes."""
    seconds: float
    """Since the last turn of a conversation."""


def make_room(connection: sqlite3.Connection, bounds: Bounds, need: int, now: float, keep: str | None) -> list[Gone]:
    """Delete what is too old, then what was used longest ago until ``need`` more bytes fit; returns what left.

    ``keep`` is the conversation that is written to. Raises HistoryFull where it alone is too large; its transaction
    then takes every deletion back.
    """
    left = drop_old(connection, bounds, now, keep)
    wanted = need + need // 8 + _SLACK
    while (used := used_bytes(connection)) + wanted > bounds.bytes:
        oldest = connection.execute(
            "SELECT tenant, id FROM threads WHERE id IS NOT ? ORDER BY used, rowid LIMIT 1", (keep,)
        ).fetchone()
        if oldest is None or wanted > bounds.bytes:
            raise HistoryFull(
                f"the turn needs {format_bytes(wanted)}, conversations take {format_bytes(used)} "
                f"of {format_bytes(bounds.bytes)} and none but its own could leave",
                hint="raise state.history_bytes, or begin a new conversation",
                need_bytes=wanted,
                used_bytes=used,
                limit_bytes=bounds.bytes,
            )
        connection.execute("DELETE FROM threads WHERE id = ?", (oldest[1],))
        left.append(Gone(*oldest))
    return left


def drop_old(connection: sqlite3.Connection, bounds: Bounds, now: float, keep: str | None = None) -> list[Gone]:
    """Delete some of the conversations that were not used for too long; returns which."""
    rows = connection.execute(
        "SELECT tenant, id FROM threads WHERE used < ? AND id IS NOT ? LIMIT ?", (now - bounds.seconds, keep, _AT_ONCE)
    ).fetchall()
    connection.executemany("DELETE FROM threads WHERE id = ?", [(thread,) for _, thread in rows])
    return [Gone(*row) for row in rows]
