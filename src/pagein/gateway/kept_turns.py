"""How a kept turn is opened and closed, by whichever door it came: its place in the line, its past, its end."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

from aiohttp import web

from pagein.gateway.call import Call
from pagein.gateway.kept_reply import KeptReply
from pagein.gateway.proxy import Proxy
from pagein.gateway.session_ports import Sessions
from pagein.gateway.turnstile import Turnstile, in_turn
from pagein.history import Past


@dataclass(frozen=True, slots=True)
class KeptTurns:
    """What the doors share whose turns are kept."""

    proxy: Proxy
    sessions: Sessions | None
    turnstile: Turnstile
    tenant: Callable[[web.Request], str]
    limit: int
    """Bytes of one body, and of the history before it."""

    async def serve(
        self, request: web.Request, reply: KeptReply, read: Callable[[ExitStack], Awaitable[Call]]
    ) -> web.StreamResponse:
        """Answer a turn that ``read`` opens; what it holds until its end is in the stack."""
        with ExitStack() as turn:
            turn.callback(reply.close)
            return await self.proxy.serve(request, read(turn), reply)

    async def open(
        self,
        reply: KeptReply,
        turn: ExitStack,
        line: str | None,
        stream: bool,
        past: Callable[[Sessions], Awaitable[Past | None]],
    ) -> tuple[Past | None, float]:
        """Wait for the turns before this one, where it has a ``line``, and return what was said, and since when.

        The moment is before the reading: what is deleted after it may be in the prompt.
        """
        if line is not None:
            key = (reply.tenant, line)
            turn.callback(await in_turn(self.turnstile, key, line, stream, reply, self.proxy))
        since = time.monotonic()
        return (await past(self.sessions) if self.sessions is not None else None), since
