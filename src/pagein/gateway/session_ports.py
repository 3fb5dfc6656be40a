"""What the gateway needs to remember conversations: one interface; the daemon's wiring gives its session store.

Every method raises StateBroken where the disk fails. ``tenant`` comes from `tenant_of` and nothing of another tenant
is ever seen: what belongs to one is "not found" for the others.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Protocol

from pagein.history import Answered, Entry, Page, Past, Span, Thread, Turn


class Sessions(Protocol):
    """Conversations as the gateway sees them; asked on the event loop, which no method blocks."""

    def tenant_of(self, key: str | None) -> str:
        """Return whose conversations a caller sees: those of its (checked) key, or of the configured salt."""
        ...

    async def keep(self, tenant: str, turn: Turn) -> None:
        """Store an answered turn; once this returns, no crash loses it.

        Raises HistoryFull, and ConversationNotFound or ResponseNotFound where what it continues was deleted meanwhile.
        """
        ...

    def abandon(self, tenant: str, thread: str) -> None:
        """Tell that a turn which would have begun a conversation was not kept: nothing of it is to stay on the disk."""
        ...

    async def past_of_conversation(self, tenant: str, conversation: str, limit: int) -> Past:
        """Return what was said in a conversation; raises ConversationNotFound, and HistoryTooLong above the limit."""
        ...

    async def past_of_response(self, tenant: str, response: str, limit: int) -> Past:
        """Return what led to a response, and the response; raises ResponseNotFound and HistoryTooLong.

        A response in a conversation is continued there: BadRequest says so.
        """
        ...

    async def past_of_session(self, tenant: str, name: str, limit: int) -> Past | None:
        """Return what was said in a session, None before its first turn; raises HistoryTooLong."""
        ...

    async def create(self, tenant: str, metadata: Mapping[str, str], entries: Sequence[Entry]) -> Thread:
        """Make a conversation; raises HistoryFull."""
        ...

    async def conversation(self, tenant: str, conversation: str) -> Thread:
        """Return a conversation of the API; raises ConversationNotFound."""
        ...

    async def update(self, tenant: str, conversation: str, metadata: Mapping[str, str]) -> Thread:
        """Replace the metadata of a conversation; raises ConversationNotFound."""
        ...

    async def add(self, tenant: str, conversation: str, entries: Sequence[Entry]) -> None:
        """Add entries to a conversation; raises ConversationNotFound, HistoryFull."""
        ...

    async def entries(self, tenant: str, conversation: str, span: Span) -> Page:
        """List entries of a conversation; raises ConversationNotFound, ItemNotFound (of `Span.after`)."""
        ...

    async def entry(self, tenant: str, conversation: str, entry: str) -> Entry:
        """Return one entry of a conversation; raises ConversationNotFound, ItemNotFound."""
        ...

    async def remove_entry(self, tenant: str, conversation: str, entry: str) -> Thread:
        """Delete one entry of a conversation; raises ConversationNotFound, ItemNotFound."""
        ...

    async def response(self, tenant: str, response: str) -> Answered:
        """Return a stored response; raises ResponseNotFound."""
        ...

    async def inputs(self, tenant: str, response: str, span: Span) -> Page:
        """List the input of a response, without what was said before; raises ResponseNotFound, ItemNotFound."""
        ...

    async def remove_response(self, tenant: str, response: str) -> None:
        """Delete a response, and outside a conversation its own input too; raises ResponseNotFound."""
        ...

    async def threads(self, tenant: str, limit: int) -> list[Thread]:
        """List conversations of every kind, last used first."""
        ...

    async def find(self, tenant: str, thread: str) -> Thread:
        """Return a conversation of any kind by its id, or a session by its name; raises ConversationNotFound."""
        ...

    async def remove(self, tenant: str, thread: str) -> None:
        """Delete a conversation of any kind with all that was said in it; raises ConversationNotFound."""
        ...

    def export(self, tenant: str, thread: str | None) -> AsyncIterator[str]:
        """Yield one conversation, or all, as lines of JSON; raises ConversationNotFound."""
        ...
