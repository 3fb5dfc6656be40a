"""Conversations, kept: the gateway's `Sessions` on one file of SQLite."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, TypeVar

from pagein.history import Answered, Entry, Gone, Page, Past, Span, Thread, ThreadKind, Turn
from pagein.sessions import reads, writes
from pagein.sessions.database import Database, used_bytes
from pagein.sessions.retention import Bounds, drop_old
from pagein.sessions.rows import response_of, thread_of
from pagein.sessions.tenant import tenant_of

T = TypeVar("T")
OnGone = Callable[[Sequence[Gone], bool], Awaitable[object]]
log = logging.getLogger(__name__)

FILE = "conversations.sqlite"
"""Its name in the state folder."""
_EXPORTED_AT_ONCE = 100
"""Entries that an export reads at a time, so that it holds little in memory."""


class SessionStore:
    """The store; its methods are those of `pagein.gateway.session_ports.Sessions`, where each is described."""

    def __init__(self, database: Database, bounds: Bounds, salt: str | None, clock: Callable[[], float]) -> None:
        self._database = database
        self._bounds = bounds
        self._salt = salt
        self._clock = clock
        self._tasks: set[asyncio.Future[Any]] = set()
        self.on_gone: OnGone | None = None
        """Told of every conversation that was deleted, or of which something was, for whatever reason; and, with False,
        of one that was only not kept."""

    @classmethod
    def open(
        cls, path: Path, bounds: Bounds, salt: str | None = None, clock: Callable[[], float] = time.time
    ) -> SessionStore:
        """Open or create the file of conversations; raises StateBroken."""
        return cls(Database.open(path), bounds, salt, clock)

    def close(self) -> None:
        """End after the writes that were asked for."""
        self._database.close()

    async def sweep(self) -> int:
        """Delete what is too old, at start; returns how many conversations left."""
        left = 0
        while gone := await self._database.write(lambda c: drop_old(c, self._bounds, self._clock())):
            left += len(gone)
            await self._tell(gone)
        if left:
            await self._database.scrub()
        return left

    async def known(self) -> set[Gone]:
        """Return every conversation that there is, of all tenants."""
        return await self._database.read(reads.known)

    async def size(self) -> int:
        """Return the bytes in use, which `Bounds.bytes` limits."""
        return await self._database.read(used_bytes)

    def tenant_of(self, key: str | None) -> str:
        """Return whose conversations a caller sees."""
        return tenant_of(key, self._salt)

    async def keep(self, tenant: str, turn: Turn) -> None:
        """Store an answered turn."""
        await self._change(lambda c: (None, writes.keep_turn(c, tenant, turn, self._bounds, self._clock())))

    def abandon(self, tenant: str, thread: str) -> None:
        """A turn that would have begun a conversation was not kept: nothing of it is to stay on the disk."""
        if self.on_gone is not None:
            self.on_gone([Gone(tenant, thread)], False)

    async def past_of_conversation(self, tenant: str, conversation: str, limit: int) -> Past:
        """Return what was said in a conversation."""
        return await self._database.read(lambda c: reads.past_of_conversation(c, tenant, conversation, limit))

    async def past_of_response(self, tenant: str, response: str, limit: int) -> Past:
        """Return what led to a response, and the response."""
        return await self._database.read(lambda c: reads.past_of_response(c, tenant, response, limit))

    async def past_of_session(self, tenant: str, name: str, limit: int) -> Past | None:
        """Return what was said in a session."""
        return await self._database.read(lambda c: reads.past_of_session(c, tenant, name, limit))

    async def create(self, tenant: str, metadata: Mapping[str, str], entries: Sequence[Entry]) -> Thread:
        """Make a conversation."""
        return await self._change(lambda c: writes.create(c, tenant, metadata, entries, self._bounds, self._clock()))

    async def conversation(self, tenant: str, conversation: str) -> Thread:
        """Return a conversation of the API."""
        return await self._database.read(lambda c: thread_of(c, tenant, conversation, ThreadKind.CONVERSATION))

    async def update(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> Thread:
        """Replace the metadata of a conversation."""
        return await self._change(
            lambda c: writes.update(c, tenant, conversation, metadata, self._bounds, self._clock())
        )

    async def add(self, tenant: str, conversation: str, entries: Sequence[Entry]) -> None:
        """Add entries to a conversation."""
        await self._change(lambda c: (None, writes.add(c, tenant, conversation, entries, self._bounds, self._clock())))

    async def entries(self, tenant: str, conversation: str, span: Span) -> Page:
        """List entries of a conversation."""
        return await self._database.read(lambda c: reads.entries(c, tenant, conversation, span))

    async def entry(self, tenant: str, conversation: str, entry: str) -> Entry:
        """Return one entry of a conversation."""
        return await self._database.read(lambda c: reads.entry(c, tenant, conversation, entry))

    async def remove_entry(self, tenant: str, conversation: str, entry: str) -> Thread:
        """Delete one entry of a conversation."""
        gone = [Gone(tenant, conversation)]
        return await self._change(lambda c: (writes.remove_entry(c, tenant, conversation, entry), gone), wanted=True)

    async def response(self, tenant: str, response: str) -> Answered:
        """Return a stored response."""
        return (await self._database.read(lambda c: response_of(c, tenant, response)))[1]

    async def inputs(self, tenant: str, response: str, span: Span) -> Page:
        """List the input of a response."""
        return await self._database.read(lambda c: reads.inputs(c, tenant, response, span))

    async def remove_response(self, tenant: str, response: str) -> None:
        """Delete a response."""
        await self._change(lambda c: (None, [Gone(tenant, writes.remove_response(c, tenant, response))]), wanted=True)

    async def threads(self, tenant: str, limit: int) -> list[Thread]:
        """List conversations of every kind, last used first."""
        return await self._database.read(lambda c: reads.threads(c, tenant, limit))

    async def find(self, tenant: str, thread: str) -> Thread:
        """Return a conversation of any kind by its id, or a session by its name."""
        return await self._database.read(lambda c: reads.find(c, tenant, thread))

    async def remove(self, tenant: str, thread: str) -> None:
        """Delete a conversation with all that was said in it."""
        await self._change(lambda c: (None, [writes.remove(c, tenant, thread)]), wanted=True)

    async def export(self, tenant: str, thread: str | None) -> AsyncIterator[str]:
        """Yield one conversation, or all, as lines of JSON."""
        if thread is not None:
            found = [(await self.find(tenant, thread)).id]
        else:
            found = await self._database.read(lambda c: reads.ids(c, tenant))
        for one in found:
            at = -1
            while True:
                lines, at = await self._database.read(partial(_lines, tenant, one, at))
                if not lines:
                    break
                for line in lines:
                    yield line

    async def _change(self, work: Callable[[Connection], tuple[T, Sequence[Gone]]], *, wanted: bool = False) -> T:
        """Write, and see to it that nothing is left of what is gone then, also where the caller leaves meanwhile.

        Where it was ``wanted`` the answer comes once that is done.
        """
        task = asyncio.ensure_future(self._write(work, wanted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return await asyncio.shield(task)

    async def _write(self, work: Callable[[Connection], tuple[T, Sequence[Gone]]], wanted: bool) -> T:
        result, gone = await self._database.write(work)
        if wanted:
            await self._database.scrub()
            await self._tell(gone)
        elif gone:
            log.info("%d conversations were deleted to stay within state.retain and state.history_bytes", len(gone))
            self._database.scrub_later()
            if self.on_gone is not None:
                self.on_gone(gone, True)
        return result

    async def _tell(self, gone: Sequence[Gone]) -> None:
        if self.on_gone is not None:
            await self.on_gone(gone, True)


def _lines(tenant: str, thread: str, after: int, connection: Connection) -> tuple[list[str], int]:
    return reads.lines_of(connection, tenant, thread, after, _EXPORTED_AT_ONCE)
