"""``/v1/conversations``: conversations that the server keeps, and their items."""

from __future__ import annotations

from collections.abc import Callable, Collection

from aiohttp import web

from pagein.errors import BadRequest, StateOff
from pagein.gateway.call import read_body
from pagein.gateway.items import read_input
from pagein.gateway.metadata import read_metadata
from pagein.gateway.openai import json_object
from pagein.gateway.pages import list_of, page_json, read_span
from pagein.gateway.session_ports import Sessions
from pagein.history import Entry, Thread

_MOST_ITEMS = 20
"""Items of one request, as OpenAI has it."""


class Conversations:
    """Handlers that make, show, change and delete conversations."""

    def __init__(self, sessions: Sessions | None, tenant: Callable[[web.Request], str], limit: int) -> None:
        self._sessions = sessions
        self._tenant = tenant
        self._limit = limit

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        return [
            web.post("/v1/conversations", self.create),
            web.get("/v1/conversations/{id}", self.show),
            web.post("/v1/conversations/{id}", self.update),
            web.delete("/v1/conversations/{id}", self.remove),
            web.get("/v1/conversations/{id}/items", self.items),
            web.post("/v1/conversations/{id}/items", self.add),
            web.get("/v1/conversations/{id}/items/{item}", self.item),
            web.delete("/v1/conversations/{id}/items/{item}", self.remove_item),
        ]

    async def create(self, request: web.Request) -> web.Response:
        """Make a conversation, with its first items where the body has some."""
        kept, fields = self._kept(), await self._fields(request, ("items", "metadata"))
        entries = [] if fields.get("items") is None else _read_items(fields["items"])
        thread = await kept.create(self._tenant(request), read_metadata(fields.get("metadata")), entries)
        return web.json_response(_json(thread))

    async def show(self, request: web.Request) -> web.Response:
        """Return a conversation."""
        return web.json_response(_json(await self._kept().conversation(self._tenant(request), _id(request))))

    async def update(self, request: web.Request) -> web.Response:
        """Replace its metadata."""
        kept, fields = self._kept(), await self._fields(request, ("metadata",))
        metadata = read_metadata(fields.get("metadata"))
        return web.json_response(_json(await kept.update(self._tenant(request), _id(request), metadata)))

    async def remove(self, request: web.Request) -> web.Response:
        """Delete it with all of its items and responses."""
        kept, tenant = self._kept(), self._tenant(request)
        thread = await kept.conversation(tenant, _id(request))
        await kept.remove(tenant, thread.id)
        return web.json_response({"id": thread.id, "object": "conversation.deleted", "deleted": True})

    async def items(self, request: web.Request) -> web.Response:
        """List its items."""
        return page_json(await self._kept().entries(self._tenant(request), _id(request), read_span(request)))

    async def add(self, request: web.Request) -> web.Response:
        """Add items at its end."""
        kept, fields = self._kept(), await self._fields(request, ("items",))
        entries = _read_items(fields.get("items"))
        await kept.add(self._tenant(request), _id(request), entries)
        return web.json_response(list_of(tuple(entries)))

    async def item(self, request: web.Request) -> web.Response:
        """Return one item."""
        entry = await self._kept().entry(self._tenant(request), _id(request), request.match_info["item"])
        return web.json_response(entry.body)

    async def remove_item(self, request: web.Request) -> web.Response:
        """Delete one item; answers with the conversation."""
        kept, item = self._kept(), request.match_info["item"]
        return web.json_response(_json(await kept.remove_entry(self._tenant(request), _id(request), item)))

    def _kept(self) -> Sessions:
        if self._sessions is None:
            raise StateOff("/v1/conversations")
        return self._sessions

    async def _fields(self, request: web.Request, known: Collection[str]) -> dict[str, object]:
        body = await read_body(request, self._limit)
        fields = json_object(body) if body.strip() else {}
        for name in fields:
            if name not in known and name != "include":
                raise BadRequest(f"the field {name[:64]!r} is not served here", param=name[:64])
        return fields


def _id(request: web.Request) -> str:
    return request.match_info["id"]


def _read_items(value: object) -> list[Entry]:
    if not isinstance(value, list) or len(value) > _MOST_ITEMS:
        got = f", not {len(value)}" if isinstance(value, list) else ""
        raise BadRequest(f"`items` must be a list of at most {_MOST_ITEMS} items{got}", param="items")
    return read_input(value, "items")


def _json(thread: Thread) -> dict[str, object]:
    created, metadata = int(thread.created), dict(thread.metadata)
    return {"id": thread.id, "object": "conversation", "created_at": created, "metadata": metadata}
