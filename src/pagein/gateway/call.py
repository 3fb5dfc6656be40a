"""One request to a model, as read from HTTP: what the proxy needs to forward it."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field

from aiohttp import web

from pagein.errors import BadRequest, RequestTooLarge
from pagein.gateway.wishes import NO_WISHES, Wishes
from pagein.history import TurnOf
from pagein.protocol import Capability

request_id: ContextVar[str] = ContextVar("request_id", default="-")
"""The id of the request that this task answers: given by the client or made by the door."""


@dataclass(frozen=True, slots=True)
class Call:
    """A model, what is asked of it, and the body in the shape of that capability's path."""

    model: str
    capability: Capability
    body: bytes
    content_type: str
    stream: bool = False
    """The client asked for server-sent events."""
    wishes: Wishes = NO_WISHES
    turn: TurnOf | None = None
    """Of the kept conversation that it continues or begins."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """What its worker is told beside; made by the daemon, since no header of a client goes on to a worker."""
    task: str | None = None
    """Of a split model; None for any other."""
    user: str | None = None
    """Whom the client asks a split model for, in its own words."""


async def read_body(request: web.Request, limit: int) -> bytes:
    """Read the whole body; raises RequestTooLarge, before reading where the length is announced."""
    length = request.content_length
    if length is not None and length > limit:
        raise RequestTooLarge(length, limit)
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge:
        raise RequestTooLarge(None, limit) from None
    except web.RequestPayloadError as error:
        raise BadRequest(f"the request body cannot be read: {error}") from error
