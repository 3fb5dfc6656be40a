"""What was said, as values: the gateway speaks them, the session store keeps them.

Bodies are kept as they came: a later turn sends the same messages again, so the model's cache of them stays usable.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

_ID = re.compile(r"[a-z]+_[0-9a-f]{48}")


class ThreadKind(StrEnum):
    """How a conversation came to be."""

    CONVERSATION = "conversation"
    """Made by `POST /v1/conversations`."""
    CHAIN = "chain"
    """Responses that continue each other by `previous_response_id`; may have branches."""
    SESSION = "session"
    """Named by the header of a chat."""


class Shape(StrEnum):
    """In whose words an entry is kept."""

    ITEM = "item"
    """An item of the Responses API."""
    MESSAGE = "message"
    """A message of the chat API."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing that was said: a message, a tool's call or its output."""

    id: str
    body: Mapping[str, Any]
    """As it came, or as the model answered."""
    shape: Shape = Shape.ITEM
    output: bool = False
    """The model said it."""


@dataclass(frozen=True, slots=True)
class Thread:
    """One conversation without what was said in it; seconds since the epoch."""

    id: str
    kind: ThreadKind
    name: str | None
    """The name of a session."""
    model: str | None
    """The model of the last turn; None before the first."""
    created: float
    used: float
    bytes: int
    """Of all that is kept of it."""
    entries: int
    metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answered:
    """A response that was answered in full."""

    id: str
    previous: str | None
    """The response that it continues."""
    body: Mapping[str, Any]
    """The response as the client got it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one answered request adds; stored whole or not at all."""

    thread: str
    kind: ThreadKind
    model: str
    entries: tuple[Entry, ...]
    name: str | None = None
    answered: Answered | None = None
    begins: bool = False
    """The thread is made with this turn; else it must still be there."""


@dataclass(frozen=True, slots=True)
class Past:
    """What was said before a turn."""

    thread: str
    kind: ThreadKind
    model: str | None
    """The model of the turn before."""
    entries: tuple[Entry, ...]


class TurnOf(NamedTuple):
    """Whose turn a request is."""

    conversation: str
    since: float
    """Monotonic seconds before its history was read: what was deleted after that may be in its prompt."""


class Gone(NamedTuple):
    """A conversation of which something was deleted: what a model computed of it is not to stay either."""

    tenant: str
    conversation: str


@dataclass(frozen=True, slots=True)
class Page:
    """Some entries of a longer list."""

    entries: tuple[Entry, ...]
    more: bool


@dataclass(frozen=True, slots=True)
class Span:
    """Which part of a list is asked for."""

    after: str | None = None
    """The entry before the first one."""
    limit: int = 20
    newest_first: bool = True


def new_id(prefix: str) -> str:
    """Return an id that nobody can guess: ``resp_…``, ``conv_…``, ``msg_…``."""
    return f"{prefix}_{secrets.token_hex(24)}"


def is_id(name: str) -> bool:
    """Tell whether `new_id` made a name."""
    return _ID.fullmatch(name) is not None
