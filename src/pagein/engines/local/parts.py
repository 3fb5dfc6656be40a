"""The path on which a worker shows the parts of a split model, and is told what to do with them."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

from aiohttp import web

from pagein.engines.local.bodies import read_json
from pagein.engines.local.fields import Fields, refuse
from pagein.protocol import PARTS_PATH

_ACTIONS = ("load", "unload", "pin", "unpin", "replace", "refresh", "rollout")
_MOST = 1 << 60


class Parted(Protocol):
    """An engine that serves a split model; asked on the event loop, which what it does must not hold up."""

    def parts_report(self, after: int) -> dict[str, object]:
        """Return how all parts are and what happened since an event of that number, JSON-ready; waits for no load."""
        ...

    async def load(self, part: str) -> None:
        """Bring a part in; raises as calls do."""
        ...

    async def unload(self, part: str) -> None:
        """Let a part go; raises InUse with the numbers where it cannot."""
        ...

    async def pin(self, part: str, pinned: bool) -> None:
        """Keep a part once it is there, or no longer."""
        ...

    async def replace(self, part: str, by: str) -> None:
        """Let a part stand in another's place."""
        ...

    async def refresh(self) -> None:
        """Read the plan again."""
        ...

    async def roll_out(self, level: str | None, percent: float | None) -> None:
        """Change the level or the share of requests that take part, with the next request."""
        ...


def add_parts_route(router: web.UrlDispatcher, engine: Parted) -> None:
    """Answer the path."""

    async def show(request: web.Request) -> web.Response:
        return web.json_response(engine.parts_report(_after(request)))

    async def act(request: web.Request) -> web.Response:
        after = _after(request)
        await _act(engine, await read_json(request, _ACTIONS))
        return web.json_response(engine.parts_report(after))

    router.add_get(PARTS_PATH, show)
    router.add_post(PARTS_PATH, act)


def _after(request: web.Request) -> int:
    return Fields(dict(request.query), ("after",)).whole("after", 0, _MOST) or 0


async def _act(engine: Parted, fields: Fields) -> None:
    given = [name for name in _ACTIONS if fields.get(name) is not None]
    if len(given) != 1:
        refuse(given[0] if given else "load", f"say one of {', '.join(_ACTIONS)}; this says {len(given)}")
    match given[0]:
        case "refresh":
            if not fields.flag("refresh"):
                refuse("refresh", "refresh must be true")
            await engine.refresh()
        case "replace":
            inner = _object(fields, "replace", ("part", "by"))
            await engine.replace(_name(inner, "part"), _name(inner, "by"))
        case "rollout":
            inner = _object(fields, "rollout", ("level", "percent"))
            level, percent = inner.text("level"), inner.number("percent", 0.0, 100.0)
            if level is None and percent is None:
                refuse("rollout", "rollout needs a level or a percent")
            await engine.roll_out(level, percent)
        case "load":
            await engine.load(_name(fields, "load"))
        case "unload":
            await engine.unload(_name(fields, "unload"))
        case "pin" | "unpin" as word:
            await engine.pin(_name(fields, word), word == "pin")


def _object(fields: Fields, name: str, known: tuple[str, ...]) -> Fields:
    value: Any = fields.get(name)
    if not isinstance(value, dict):
        _not_an_object(name)
    return Fields(value, known)


def _not_an_object(name: str) -> NoReturn:
    refuse(name, f"{name} must be an object")


def _name(fields: Fields, name: str) -> str:
    value = fields.text(name)
    if not value:
        refuse(name, f"{name} must name a part")
    return value
