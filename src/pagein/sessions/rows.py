"""Values to rows and back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Mapping
from typing import Any

from pagein.errors import ConversationNotFound, ResponseNotFound
from pagein.history import Answered, Entry, Shape, Thread, ThreadKind

THREAD = "id, kind, name, model, created, used, bytes, entries, metadata"
ENTRY = "id, body, shape, output"


def to_json(value: Mapping[str, Any]) -> str:
    """Return JSON that SQLite can hold: engines send half an emoji, which UTF-8 has no bytes for."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def size(text: str) -> int:
    """Return the bytes that a text takes in the file."""
    return len(text.encode())


def to_thread(row: tuple[Any, ...]) -> Thread:
    """Read a row of `THREAD`."""
    identity, kind, name, model, created, used, count, entries, metadata = row
    return Thread(identity, ThreadKind(kind), name, model, created, used, count, entries, json.loads(metadata))


def to_entry(row: tuple[Any, ...]) -> Entry:
    """Read a row of `ENTRY`."""
    identity, body, shape, output = row
    return Entry(identity, json.loads(body), Shape(shape), bool(output))


def thread_of(connection: sqlite3.Connection, tenant: str, thread: str, kind: ThreadKind | None = None) -> Thread:
    """Return a conversation of this tenant, and of one kind where one is meant; raises ConversationNotFound."""
    row = connection.execute(f"SELECT {THREAD} FROM threads WHERE id = ? AND tenant = ?", (thread, tenant)).fetchone()
    if row is None or (kind is not None and row[1] != kind):
        raise ConversationNotFound(f"there is no conversation {thread[:100]!r}", conversation=thread[:100])
    return to_thread(row)


def response_of(connection: sqlite3.Connection, tenant: str, response: str) -> tuple[Thread, Answered]:
    """Return a stored response and its conversation; raises ResponseNotFound."""
    row = connection.execute(
        "SELECT r.thread, r.previous, r.body FROM responses r JOIN threads t ON t.id = r.thread "
        "WHERE r.id = ? AND t.tenant = ?",
        (response, tenant),
    ).fetchone()
    if row is None:
        raise ResponseNotFound(f"there is no stored response {response[:100]!r}", response=response[:100])
    return thread_of(connection, tenant, row[0]), Answered(response, row[1], json.loads(row[2]))
