"""``/api/state``: what is kept of conversations of every kind, for people and the command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from aiohttp import web

from pagein.errors import BadRequest, StateOff
from pagein.gateway.session_ports import Sessions

_LINES = "application/jsonl"
_USUAL, _MOST = 1000, 10_000
"""Conversations of one list."""


class State:
    """Handlers that list, delete and export conversations."""

    def __init__(self, sessions: Sessions | None, tenant: Callable[[web.Request], str]) -> None:
        self._sessions = sessions
        self._tenant = tenant

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        return [
            web.get("/api/state/conversations", self.list),
            web.get("/api/state/conversations/{id}", self.show),
            web.delete("/api/state/conversations/{id}", self.remove),
            web.get("/api/state/export", self.export),
        ]

    async def list(self, request: web.Request) -> web.Response:
        """List conversations, last used first."""
        threads = await self._kept().threads(self._tenant(request), _limit(request))
        return web.json_response({"conversations": [asdict(thread) for thread in threads]})

    async def show(self, request: web.Request) -> web.Response:
        """Return one by its id, or a session by its name."""
        return web.json_response(asdict(await self._kept().find(self._tenant(request), request.match_info["id"])))

    async def remove(self, request: web.Request) -> web.Response:
        """Delete one by its id, or a session by its name."""
        kept, tenant = self._kept(), self._tenant(request)
        thread = await kept.find(tenant, request.match_info["id"])
        await kept.remove(tenant, thread.id)
        return web.Response(status=204)

    async def export(self, request: web.Request) -> web.StreamResponse:
        """Send one conversation, or all, as lines of JSON; what goes wrong amid them cuts the connection."""
        kept, tenant = self._kept(), self._tenant(request)
        wanted = request.query.get("conversation")
        thread = (await kept.find(tenant, wanted)).id if wanted is not None else None
        response = web.StreamResponse(headers={"Content-Type": _LINES})
        await response.prepare(request)
        async for line in kept.export(tenant, thread):
            await response.write(line.encode())
        await response.write_eof()
        return response

    def _kept(self) -> Sessions:
        if self._sessions is None:
            raise StateOff("/api/state")
        return self._sessions


def _limit(request: web.Request) -> int:
    text = request.query.get("limit", str(_USUAL))
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:9]) <= _MOST):
        raise BadRequest(f"`limit` must be a number from 1 to {_MOST}", param="limit")
    return int(text)
