"""Parts of split models for operators: what is in memory, load and unload by hand, the roll-out."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from pagein.errors import BadRequest
from pagein.gateway.call import read_body
from pagein.gateway.openai import json_object
from pagein.gateway.parts_ports import LEVELS
from pagein.gateway.ports import Desk
from pagein.gateway.views import as_json

_LONGEST_BODY = 4096
_VERBS = ("load", "unload", "pin", "unpin")


class PartsPaths:
    """Handlers that ask the desk for its split models."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        model = "/api/models/{name}"
        return [
            web.get("/health/lazy", self.lazy),
            web.get(f"{model}/parts", self.show),
            web.post(f"{model}/parts/refresh", self.refresh),
            *(web.post(f"{model}/parts/{{part}}/{verb}", self._act(verb)) for verb in _VERBS),
            web.post(f"{model}/parts/{{part}}/replace", self.replace),
            web.post(f"{model}/rollout", self.rollout),
        ]

    async def lazy(self, request: web.Request) -> web.Response:
        """Show every part of every split model as it is now; loads nothing, and never waits for long."""
        found = await self._desk.split.look()
        return web.json_response({"status": "ok", "models": {name: as_json(one) for name, one in found.items()}})

    async def show(self, request: web.Request) -> web.Response:
        """Show the parts of one model."""
        return web.json_response(as_json(await self._desk.split.view(request.match_info["name"])))

    async def refresh(self, request: web.Request) -> web.Response:
        """Let a loaded model read its plan again, for parts that joined it."""
        return await self._done(request, {"refresh": True})

    async def replace(self, request: web.Request) -> web.Response:
        """Let another part stand in a part's place while calls run."""
        fields = await _fields(request, "by")
        by = fields.get("by")
        if not isinstance(by, str):
            raise BadRequest("`by` must be the name of the part that is to stand there", param="by")
        return await self._done(request, {"replace": {"part": request.match_info["part"], "by": by}})

    async def rollout(self, request: web.Request) -> web.Response:
        """Change how much is done on demand, or for how many requests; answers with the parts as they are then."""
        fields = await _fields(request, "level", "percent")
        level, percent = _level(fields.get("level")), _percent(fields.get("percent"))
        if level is None and percent is None:
            raise BadRequest("the roll-out needs `level`, `percent` or both", param="level")
        name = request.match_info["name"]
        return web.json_response(as_json(await self._desk.split.set_rollout(name, level, percent)))

    def _act(self, verb: str) -> Any:
        async def act(request: web.Request) -> web.Response:
            return await self._done(request, {verb: request.match_info["part"]})

        return act

    async def _done(self, request: web.Request, wish: dict[str, object]) -> web.Response:
        return web.json_response(as_json(await self._desk.split.act(request.match_info["name"], wish)))


async def _fields(request: web.Request, *known: str) -> dict[str, object]:
    body = await read_body(request, _LONGEST_BODY)
    fields = json_object(body) if body.strip() else {}
    for given in fields:
        if given not in known:
            raise BadRequest(f"there is no field {given[:64]!r} here; known: {', '.join(known)}", param=given[:64])
    return fields


def _level(given: object) -> str | None:
    if given is None or (isinstance(given, str) and given in LEVELS):
        return given
    raise BadRequest(f"`level` must be one of {', '.join(LEVELS)}", param="level")


def _percent(given: object) -> float | None:
    if given is None:
        return None
    if isinstance(given, int | float) and not isinstance(given, bool) and 0 <= given <= 100:
        return float(given)
    raise BadRequest("`percent` must be a number from 0 to 100", param="percent")
