"""The path on which a worker shows its pool of KV caches, and is told which of them must go, or be read through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from pagein.engines.local.bodies import read_json
from pagein.engines.local.fields import Fields, refuse
from pagein.protocol import KV_PATH

_MOST_SECONDS = 1e9
_MOST_AT_ONCE = 10_000


@dataclass(frozen=True, slots=True)
class Freed:
    """What went."""

    conversations: int
    bytes: int
    """On the disk."""


class Pooled(Protocol):
    """An engine that keeps KV caches of conversations; asked on the event loop."""

    async def kv_report(self) -> dict[str, object]:
        """Return what lies where, JSON-ready."""
        ...

    async def forget(self, gone: Sequence[tuple[str, str]]) -> Freed:
        """Remove conversations, each as tenant and id; one in a turn goes at the end of that."""
        ...

    async def thin_out(self, idle: float | None) -> Freed:
        """Remove what was not used for so many seconds, or all."""
        ...

    async def check(self, after: str | None) -> dict[str, object]:
        """Read a part of the blocks on the disk through, JSON-ready; ValueError for a place that is none."""
        ...


def add_kv_route(router: web.UrlDispatcher, engine: Pooled) -> None:
    """Answer the path."""

    async def show(request: web.Request) -> web.Response:
        return web.json_response(await engine.kv_report())

    async def act(request: web.Request) -> web.Response:
        fields = await read_json(request, ("forget", "idle", "all", "check"))
        if (place := fields.text("check")) is not None:
            return web.json_response(await _check(engine, place))
        freed = await _act(engine, fields)
        return web.json_response({"conversations": freed.conversations, "bytes": freed.bytes})

    router.add_get(KV_PATH, show)
    router.add_post(KV_PATH, act)


async def _act(engine: Pooled, fields: Fields) -> Freed:
    if fields.get("forget") is not None:
        return await engine.forget(_named(fields.get("forget")))
    if (idle := fields.number("idle", 0.0, _MOST_SECONDS)) is not None:
        return await engine.thin_out(idle)
    if fields.flag("all"):
        return await engine.thin_out(None)
    refuse("forget", "say what shall go (forget, idle or all), or what to check")


async def _check(engine: Pooled, place: str) -> dict[str, object]:
    try:
        return await engine.check(place or None)
    except ValueError as error:
        refuse("check", str(error))


def _named(value: object) -> list[tuple[str, str]]:
    if not isinstance(value, list) or len(value) > _MOST_AT_ONCE:
        refuse("forget", f"forget must be a list of up to {_MOST_AT_ONCE} pairs of tenant and conversation")
    for one in value:
        if not isinstance(one, list) or len(one) != 2 or not all(isinstance(part, str) for part in one):
            refuse("forget", "each of forget must be a pair of tenant and conversation")
    return [(tenant, conversation) for tenant, conversation in value]
