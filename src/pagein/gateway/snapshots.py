"""``/api/state`` of saved conversations: show, read through, remove. No word that was said leaves by these paths."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict

from aiohttp import web

from pagein.errors import BadRequest, SnapshotNotFound, StateOff
from pagein.gateway.call import read_body
from pagein.gateway.openai import json_object
from pagein.gateway.ports import Desk
from pagein.gateway.snapshot_ports import Snapshots, Verified
from pagein.units import parse_duration

_LONGEST_BODY = 4096
_ID = re.compile(r"[0-9a-f]{24}")


class SnapshotPaths:
    """Handlers that ask the desk for its snapshots."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        return [
            web.get("/api/state", self.show),
            web.get("/api/state/kv", self.pools),
            web.delete("/api/state/snapshots", self.remove_all),
            web.delete("/api/state/snapshots/{id}", self.remove),
            web.post("/api/state/verify", self.verify),
            web.post("/api/state/gc", self.gc),
        ]

    async def show(self, request: web.Request) -> web.Response:
        """Show what is saved, what it takes, and what was reused of it."""
        return web.json_response(asdict(await self._kept(request).view()))

    async def pools(self, request: web.Request) -> web.Response:
        """Show the pools of workers that keep KV caches by themselves."""
        return web.json_response({"models": await self._kept(request).pools()})

    async def remove(self, request: web.Request) -> web.Response:
        """Remove one."""
        await self._kept(request).remove([_known(request.match_info["id"])])
        return web.Response(status=204)

    async def remove_all(self, request: web.Request) -> web.Response:
        """Remove all."""
        return web.json_response(asdict(await self._kept(request).remove(None)))

    async def verify(self, request: web.Request) -> web.Response:
        """Read one or all through, or KV blocks of a model; the answer lists what is damaged."""
        kept, fields = self._kept(request), await _fields(request, "id", "blocks", "after")
        wanted, model, after = fields.get("id"), fields.get("blocks"), fields.get("after")
        if model is not None:
            return web.json_response(asdict(await _blocks(kept, model, after)))
        if wanted is not None and not isinstance(wanted, str):
            raise BadRequest("`id` must be the id of a snapshot", param="id")
        return web.json_response(asdict(await kept.verify(None if wanted is None else _known(wanted))))

    async def gc(self, request: web.Request) -> web.Response:
        """Sweep, and remove what is idle for too long."""
        kept, wanted = self._kept(request), (await _fields(request, "idle")).get("idle")
        return web.json_response(asdict(await kept.gc(None if wanted is None else _seconds(wanted))))

    def _kept(self, request: web.Request) -> Snapshots:
        kept = self._desk.snapshots
        if kept is None:
            off = StateOff(request.path)
            off.hint = "set state.enabled: true and start the daemon again"
            raise off
        return kept


async def _blocks(kept: Snapshots, model: object, after: object) -> Verified:
    if not isinstance(model, str):
        raise BadRequest("`blocks` must be the name of a model", param="blocks")
    try:
        if after is not None and not isinstance(after, str):
            raise ValueError("it must be the `next` of an answer")
        return await kept.verify_blocks(model, after)
    except ValueError as error:
        raise BadRequest(f"`after`: {error}", param="after") from None


async def _fields(request: web.Request, *known: str) -> Mapping[str, object]:
    """Return the fields of a body, which may have these; no body has none."""
    body = await read_body(request, _LONGEST_BODY)
    fields = json_object(body) if body.strip() else {}
    for given in fields:
        if given not in known:
            names = ", ".join(known)
            raise BadRequest(f"there is no field {given[:64]!r} here; known: {names}", param=given[:64])
    return fields


def _known(given: str) -> str:
    if not _ID.fullmatch(given):
        raise SnapshotNotFound(given[:64])
    return given


def _seconds(given: object) -> float:
    try:
        if not isinstance(given, str | int | float) or isinstance(given, bool):
            raise ValueError("not a duration")
        return parse_duration(given[:64] if isinstance(given, str) else given)
    except ValueError:
        raise BadRequest("`idle` must be seconds, or a text such as '7d'", param="idle") from None
