"""What changes the file; each function runs inside one transaction of the writer."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from pagein.errors import ConversationNotFound, ItemNotFound, ResponseNotFound
from pagein.history import Answered, Entry, Gone, Thread, ThreadKind, Turn, new_id
from pagein.sessions.retention import Bounds, make_room
from pagein.sessions.rows import response_of, size, thread_of, to_json

_PUT_THREAD = "INSERT INTO threads VALUES (?, ?, ?, ?, ?, ?, ?, '{}', 0, 0)"
_PUT_ENTRY = "INSERT INTO entries (id, thread, response, shape, output, body) VALUES (?, ?, ?, ?, ?, ?)"
_GROW = "UPDATE threads SET bytes = bytes + ?, entries = entries + ? WHERE id = ?"


def keep_turn(connection: sqlite3.Connection, tenant: str, turn: Turn, bounds: Bounds, now: float) -> list[Gone]:
    """Add an answered turn and return the conversations that left for it.

    Raises ConversationNotFound and ResponseNotFound where what it continues is gone, and HistoryFull.
    """
    answered = turn.answered
    bodies = [to_json(entry.body) for entry in turn.entries]
    response = to_json(answered.body) if answered is not None else ""
    left = make_room(connection, bounds, sum(map(size, bodies)) + size(response), now, turn.thread)
    if turn.begins:
        _begin(connection, tenant, turn, now)
    elif _kind(connection, tenant, turn.thread) is not turn.kind:
        raise ConversationNotFound(f"conversation {turn.thread!r} was deleted meanwhile", conversation=turn.thread)
    if answered is not None:
        _put_response(connection, tenant, turn.thread, answered, response)
    _put_entries(connection, turn.thread, turn.entries, bodies, answered.id if answered is not None else None)
    connection.execute("UPDATE threads SET used = ?, model = ? WHERE id = ?", (now, turn.model, turn.thread))
    return left


def _begin(connection: sqlite3.Connection, tenant: str, turn: Turn, now: float) -> None:
    values = (turn.thread, tenant, turn.kind, turn.name, turn.model, now, now)
    connection.execute(_PUT_THREAD, values)


def _kind(connection: sqlite3.Connection, tenant: str, thread: str) -> ThreadKind | None:
    row = connection.execute("SELECT kind FROM threads WHERE id = ? AND tenant = ?", (thread, tenant)).fetchone()
    return ThreadKind(row[0]) if row is not None else None


def _put_response(connection: sqlite3.Connection, tenant: str, thread: str, answered: Answered, body: str) -> None:
    if answered.previous is not None:
        try:
            response_of(connection, tenant, answered.previous)
        except ResponseNotFound:
            raise ResponseNotFound(f"response {answered.previous!r} was deleted meanwhile") from None
    connection.execute("INSERT INTO responses VALUES (?, ?, ?, ?)", (answered.id, thread, answered.previous, body))
    connection.execute(_GROW, (size(body), 0, thread))


def _put_entries(
    connection: sqlite3.Connection, thread: str, entries: Sequence[Entry], bodies: Sequence[str], response: str | None
) -> None:
    for entry, body in zip(entries, bodies, strict=True):
        connection.execute(_PUT_ENTRY, (entry.id, thread, response, entry.shape, entry.output, body))
    connection.execute(_GROW, (sum(map(size, bodies)), len(bodies), thread))


def create(
    connection: sqlite3.Connection,
    tenant: str,
    metadata: Mapping[str, str],
    entries: Sequence[Entry],
    bounds: Bounds,
    now: float,
) -> tuple[Thread, list[Gone]]:
    """Make a conversation with its first entries, and return what left for it; raises HistoryFull."""
    thread = new_id("conv")
    told, bodies = to_json(metadata), [to_json(entry.body) for entry in entries]
    left = make_room(connection, bounds, size(told) + sum(map(size, bodies)), now, None)
    connection.execute(_PUT_THREAD, (thread, tenant, ThreadKind.CONVERSATION, None, None, now, now))
    connection.execute("UPDATE threads SET metadata = ? WHERE id = ?", (told, thread))
    _put_entries(connection, thread, entries, bodies, None)
    return thread_of(connection, tenant, thread), left


def update(
    connection: sqlite3.Connection, tenant: str, thread: str, metadata: Mapping[str, str], bounds: Bounds, now: float
) -> tuple[Thread, list[Gone]]:
    """Replace the metadata of a conversation, and return what left for it; raises ConversationNotFound, HistoryFull."""
    thread_of(connection, tenant, thread, ThreadKind.CONVERSATION)
    told = to_json(metadata)
    left = make_room(connection, bounds, size(told), now, thread)
    connection.execute("UPDATE threads SET metadata = ?, used = ? WHERE id = ?", (told, now, thread))
    return thread_of(connection, tenant, thread), left


def add(
    connection: sqlite3.Connection, tenant: str, thread: str, entries: Sequence[Entry], bounds: Bounds, now: float
) -> list[Gone]:
    """Add entries to a conversation, and return what left for them; raises ConversationNotFound, HistoryFull."""
    thread_of(connection, tenant, thread, ThreadKind.CONVERSATION)
    bodies = [to_json(entry.body) for entry in entries]
    left = make_room(connection, bounds, sum(map(size, bodies)), now, thread)
    _put_entries(connection, thread, entries, bodies, None)
    connection.execute("UPDATE threads SET used = ? WHERE id = ?", (now, thread))
    return left


def remove_entry(connection: sqlite3.Connection, tenant: str, thread: str, entry: str) -> Thread:
    """Delete one entry of a conversation; raises ConversationNotFound, ItemNotFound."""
    thread_of(connection, tenant, thread, ThreadKind.CONVERSATION)
    row = connection.execute("SELECT seq, body FROM entries WHERE thread = ? AND id = ?", (thread, entry)).fetchone()
    if row is None:
        raise ItemNotFound(f"conversation {thread!r} has no item {entry[:100]!r}", item=entry[:100])
    connection.execute("DELETE FROM entries WHERE seq = ?", (row[0],))
    connection.execute(_GROW, (-size(row[1]), -1, thread))
    return thread_of(connection, tenant, thread)


def remove_response(connection: sqlite3.Connection, tenant: str, response: str) -> str:
    """Delete a response, and outside a conversation its entries; returns whose it was. Raises ResponseNotFound.

    A branch that continues it keeps its own text, but can no longer be continued itself.
    """
    thread, _ = response_of(connection, tenant, response)
    size_of = "SELECT COALESCE(SUM(LENGTH(CAST(body AS BLOB))), 0), COUNT(*) FROM"
    gone = connection.execute(f"{size_of} responses WHERE id = ?", (response,)).fetchone()[0]
    connection.execute("DELETE FROM responses WHERE id = ?", (response,))
    count = 0
    if thread.kind is ThreadKind.CHAIN:
        text, count = connection.execute(f"{size_of} entries WHERE response = ?", (response,)).fetchone()
        gone += text
        connection.execute("DELETE FROM entries WHERE response = ?", (response,))
    connection.execute(_GROW, (-gone, -count, thread.id))
    if thread.kind is ThreadKind.CHAIN:
        connection.execute(
            "DELETE FROM threads WHERE id = ? AND NOT EXISTS (SELECT 1 FROM responses WHERE thread = ?)",
            (thread.id, thread.id),
        )
    return thread.id


def remove(connection: sqlite3.Connection, tenant: str, thread: str) -> Gone:
    """Delete a conversation of any kind with all that was said in it; raises ConversationNotFound."""
    thread_of(connection, tenant, thread)
    connection.execute("DELETE FROM threads WHERE id = ?", (thread,))
    return Gone(tenant, thread)
