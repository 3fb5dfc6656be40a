"""The path on which a worker is told to live with other bytes than it was started with."""

from __future__ import annotations

from typing import Protocol

from aiohttp import web

from pagein.engines.local.bodies import read_json
from pagein.engines.local.fields import refuse
from pagein.protocol import ALLOWANCE_PATH

_MOST = 1 << 60


class Adjustable(Protocol):
    """An engine that can give bytes back, and take some, while it computes."""

    @property
    def pool(self) -> str:
        """The pool that its weights are in and its allowance counts: ``ram`` or ``cuda:N``."""
        ...

    async def set_allowance(self, count: int) -> dict[str, object]:
        """Keep within ``count`` bytes of the pool from now on and return what becomes of them, JSON-ready.

        Raises DoesNotFit with both numbers, and changes nothing.
        """
        ...


def add_allowance_route(router: web.UrlDispatcher, engine: Adjustable) -> None:
    """Answer the path; ``pool`` in the body is for whoever wants to be sure which memory is meant."""

    async def act(request: web.Request) -> web.Response:
        fields = await read_json(request, ("bytes", "pool"))
        count = fields.whole("bytes", 1, _MOST)
        if count is None:
            refuse("bytes", "bytes is missing")
        if (pool := fields.text("pool")) not in (None, engine.pool):
            refuse("pool", f"pool is {pool!r}; only what the model has of {engine.pool} can change while it lives")
        return web.json_response({"pool": engine.pool, "bytes": count, **await engine.set_allowance(count)})

    router.add_post(ALLOWANCE_PATH, act)
