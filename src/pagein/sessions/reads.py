"""What is asked of the file; each function sees one consistent state of it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from pagein.errors import BadRequest, ConversationNotFound, HistoryTooLong, ItemNotFound, ResponseNotFound
from pagein.history import Entry, Gone, Page, Past, Span, Thread, ThreadKind
from pagein.sessions.rows import ENTRY, THREAD, response_of, thread_of, to_entry, to_thread

_CHAIN = """
    WITH RECURSIVE chain (id, previous, depth) AS (
        SELECT id, previous, 0 FROM responses WHERE id = ?
        UNION ALL
        SELECT r.id, r.previous, c.depth + 1 FROM responses r JOIN chain c ON r.id = c.previous
    )
"""
_LENGTH = "COALESCE(SUM(LENGTH(CAST(body AS BLOB))), 0)"


def past_of_conversation(connection: sqlite3.Connection, tenant: str, thread: str, limit: int) -> Past:
    """Return what was said in a conversation; raises ConversationNotFound, HistoryTooLong."""
    return _past(connection, thread_of(connection, tenant, thread, ThreadKind.CONVERSATION), limit)


def past_of_session(connection: sqlite3.Connection, tenant: str, name: str, limit: int) -> Past | None:
    """Return what was said in a session, None before its first turn; raises HistoryTooLong."""
    thread = _by_name(connection, tenant, name)
    return _past(connection, thread, limit) if thread is not None else None


def _past(connection: sqlite3.Connection, thread: Thread, limit: int) -> Past:
    where, values = "thread = ?", (thread.id,)
    _check_length(connection, "", where, values, thread.name or thread.id, limit)
    rows = connection.execute(f"SELECT {ENTRY} FROM entries WHERE {where} ORDER BY seq", values)
    return Past(thread.id, thread.kind, thread.model, tuple(map(to_entry, rows)))


def past_of_response(connection: sqlite3.Connection, tenant: str, response: str, limit: int) -> Past:
    """Return what led to a response and its output; raises ResponseNotFound, HistoryTooLong, BadRequest.

    An entry of an earlier response was stored before every later one, so the order of storing is that of the branch.
    """
    thread, answered = response_of(connection, tenant, response)
    if thread.kind is not ThreadKind.CHAIN:
        raise BadRequest(
            f"response {response!r} is part of conversation {thread.id!r}: continue it with `conversation`",
            param="previous_response_id",
        )
    lost = connection.execute(
        f"{_CHAIN} SELECT id, previous FROM chain ORDER BY depth DESC LIMIT 1", (response,)
    ).fetchone()
    if lost[1] is not None:
        raise ResponseNotFound(
            f"response {response!r} cannot be continued: it goes back to {lost[1]!r}, which was deleted",
            response=response,
        )
    where, values = "response IN (SELECT id FROM chain)", (response,)
    _check_length(connection, _CHAIN, where, values, response, limit)
    rows = connection.execute(f"{_CHAIN} SELECT {ENTRY} FROM entries WHERE {where} ORDER BY seq", values)
    model = answered.body.get("model")
    return Past(thread.id, thread.kind, model if isinstance(model, str) else None, tuple(map(to_entry, rows)))


def _check_length(
    connection: sqlite3.Connection, head: str, where: str, values: Sequence[str], what: str, limit: int
) -> None:
    (length,) = connection.execute(f"{head} SELECT {_LENGTH} FROM entries WHERE {where}", values).fetchone()
    if length > limit:
        raise HistoryTooLong(what, length, limit)


def entries(connection: sqlite3.Connection, tenant: str, thread: str, span: Span) -> Page:
    """List entries of a conversation; raises ConversationNotFound, ItemNotFound."""
    thread_of(connection, tenant, thread, ThreadKind.CONVERSATION)
    return _page(connection, "thread = ?", thread, span)


def inputs(connection: sqlite3.Connection, tenant: str, response: str, span: Span) -> Page:
    """List the input of a response; raises ResponseNotFound, ItemNotFound."""
    response_of(connection, tenant, response)
    return _page(connection, "output = 0 AND response = ?", response, span)


def _page(connection: sqlite3.Connection, where: str, owner: str, span: Span) -> Page:
    order, beyond = ("DESC", "<") if span.newest_first else ("ASC", ">")
    values: list[Any] = [owner]
    if span.after is not None:
        row = connection.execute(f"SELECT seq FROM entries WHERE {where} AND id = ?", (owner, span.after)).fetchone()
        if row is None:
            raise ItemNotFound(f"there is no item {span.after[:100]!r} to list after", item=span.after[:100])
        where += f" AND seq {beyond} ?"
        values.append(row[0])
    rows = connection.execute(
        f"SELECT {ENTRY} FROM entries WHERE {where} ORDER BY seq {order} LIMIT ?", (*values, span.limit + 1)
    ).fetchall()
    return Page(tuple(map(to_entry, rows[: span.limit])), len(rows) > span.limit)


def entry(connection: sqlite3.Connection, tenant: str, thread: str, wanted: str) -> Entry:
    """Return one entry of a conversation; raises ConversationNotFound, ItemNotFound."""
    thread_of(connection, tenant, thread, ThreadKind.CONVERSATION)
    row = connection.execute(f"SELECT {ENTRY} FROM entries WHERE thread = ? AND id = ?", (thread, wanted)).fetchone()
    if row is None:
        raise ItemNotFound(f"conversation {thread!r} has no item {wanted[:100]!r}", item=wanted[:100])
    return to_entry(row)


def threads(connection: sqlite3.Connection, tenant: str, limit: int) -> list[Thread]:
    """List conversations of every kind, last used first."""
    rows = connection.execute(
        f"SELECT {THREAD} FROM threads WHERE tenant = ? ORDER BY used DESC, rowid DESC LIMIT ?", (tenant, limit)
    )
    return list(map(to_thread, rows))


def ids(connection: sqlite3.Connection, tenant: str) -> list[str]:
    """List the ids of all conversations, oldest first."""
    return [row[0] for row in connection.execute("SELECT id FROM threads WHERE tenant = ? ORDER BY rowid", (tenant,))]


def known(connection: sqlite3.Connection) -> set[Gone]:
    """All conversations that there are, of all tenants."""
    return {Gone(*row) for row in connection.execute("SELECT tenant, id FROM threads")}


def find(connection: sqlite3.Connection, tenant: str, word: str) -> Thread:
    """Return a conversation of any kind by its id, or a session by its name; raises ConversationNotFound."""
    named = _by_name(connection, tenant, word)
    return named if named is not None else thread_of(connection, tenant, word)


def _by_name(connection: sqlite3.Connection, tenant: str, name: str) -> Thread | None:
    row = connection.execute(f"SELECT {THREAD} FROM threads WHERE tenant = ? AND name = ?", (tenant, name)).fetchone()
    return to_thread(row) if row is not None else None


def lines_of(connection: sqlite3.Connection, tenant: str, thread: str, after: int, limit: int) -> tuple[list[str], int]:
    """Return some lines of an export and where to go on; no lines at its end, or where it was deleted meanwhile.

    The first line is the conversation itself; then each entry with the response that it belongs to.
    """
    lines = []
    if after < 0:
        try:
            lines.append(_line("conversation", asdict(thread_of(connection, tenant, thread))))
        except ConversationNotFound:
            return [], after
        after = 0
    rows = connection.execute(
        f"SELECT seq, response, {ENTRY} FROM entries WHERE thread = ? AND seq > ? ORDER BY seq LIMIT ?",
        (thread, after, limit),
    )
    previous: dict[str, str | None] = {}
    for seq, response, *row in rows:
        if response is not None and response not in previous:
            found = connection.execute("SELECT previous FROM responses WHERE id = ?", (response,)).fetchone()
            previous[response] = found[0] if found is not None else None
        more = {"response": response, "previous_response": previous[response]} if response is not None else {}
        lines.append(_line("entry", {"conversation": thread, **more, **asdict(to_entry(tuple(row)))}))
        after = seq
    return lines, after


def _line(kind: str, value: dict[str, Any]) -> str:
    return json.dumps({"type": kind, **value}) + "\n"
