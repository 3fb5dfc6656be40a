"""Memory for programs beside Pagein: ``/api/leases`` (a training job, a renderer, a game)."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass

from aiohttp import web

from pagein.config.values import SMALLEST_BUDGET, did_you_mean
from pagein.errors import BadRequest, LeaseNotFound
from pagein.gateway.call import read_body
from pagein.gateway.openai import json_object
from pagein.gateway.ports import Desk
from pagein.gateway.views import as_json
from pagein.units import format_bytes, parse_bytes, parse_duration

_LONGEST_BODY = 64 * 1024
_LONGEST_WORD = 200
_LARGEST_PID = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What an outsider asks for, as read from a body."""

    pool: str
    count: int
    ttl: float | None
    wait: float | None
    pid: int | None
    holder: str


class Leases:
    """Handlers that ask the desk for memory, and give it back."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        return [
            web.post("/api/leases", self.take),
            web.get("/api/leases", self.list),
            web.delete("/api/leases/{id}", self.give_back),
            web.post("/api/leases/{id}/extend", self.extend),
        ]

    async def take(self, request: web.Request) -> web.StreamResponse:
        """Wait for memory and answer with the lease; a client that leaves takes its wish back."""
        wish = read_wish(json_object(await read_body(request, _LONGEST_BODY)))
        view = await self._desk.take_room(wish.pool, wish.count, wish.ttl, wish.wait, wish.pid, wish.holder)
        response = web.json_response(as_json(view), status=201, headers={"Location": f"/api/leases/{view.id}"})
        try:
            await response.prepare(request)
            await response.write_eof()
        except BaseException:  # the client has left, so nobody knows the lease that came too late
            with suppress(LeaseNotFound):
                self._desk.give_room_back(view.id)
            raise
        return response

    async def list(self, request: web.Request) -> web.Response:
        """List the leases, those included that still wait."""
        return web.json_response({"leases": [as_json(room) for room in self._desk.status().rooms]})

    async def give_back(self, request: web.Request) -> web.Response:
        """End a lease."""
        self._desk.give_room_back(request.match_info["id"])
        return web.Response(status=204)

    async def extend(self, request: web.Request) -> web.Response:
        """Count the time to live of a lease from now."""
        fields = json_object(await read_body(request, _LONGEST_BODY))
        _only_known(fields, ("ttl",))
        ttl = _seconds(fields, "ttl", positive=True)
        if ttl is None:
            raise BadRequest("the extension needs `ttl`: seconds, or a text such as '10m'", param="ttl")
        return web.json_response(as_json(self._desk.extend_room(request.match_info["id"], ttl)))


def read_wish(fields: dict[str, object]) -> Wish:
    """Read the body of ``POST /api/leases``; raises BadRequest that names the field."""
    _only_known(fields, ("pool", "bytes", "ttl", "wait", "pid", "holder"))
    wish = Wish(
        pool=_word(fields, "pool", "ram"),
        count=_size(fields.get("bytes")),
        ttl=_seconds(fields, "ttl", positive=True),
        wait=_seconds(fields, "wait"),
        pid=_pid(fields.get("pid")),
        holder=_word(fields, "holder", ""),
    )
    if wish.ttl is None and wish.pid is None:
        raise BadRequest(
            "the lease needs `ttl` or `pid`: with neither it could never end by itself",
            hint="set `ttl` ('10m'), or `pid` to the process that holds the memory",
            param="ttl",
        )
    return wish


def _only_known(fields: dict[str, object], known: Collection[str]) -> None:
    for name in fields:
        if name not in known:
            listing = f"; known: {', '.join(known)}"
            raise BadRequest(
                f"there is no field {name[:64]!r} here{did_you_mean(name[:64], known) or listing}", param=name[:64]
            )


def _size(value: object) -> int:
    if value is None:
        raise BadRequest("the lease needs `bytes`: a number, or a text such as '8GiB'", param="bytes")
    try:
        if isinstance(value, str):
            count = parse_bytes(value[:_LONGEST_WORD])
        elif isinstance(value, int):
            count = parse_bytes(value)
        else:
            raise ValueError("not a size")
    except ValueError as error:
        message = f"`bytes`: {str(error).split(';')[0][:_LONGEST_WORD]}; write a number of bytes or '8GiB'"
        raise BadRequest(message, param="bytes") from None
    if count < SMALLEST_BUDGET:
        least = format_bytes(SMALLEST_BUDGET)
        raise BadRequest(f"`bytes`: {format_bytes(count)} is less than {least}; write it as '8GiB'", param="bytes")
    return count


def _seconds(fields: dict[str, object], name: str, positive: bool = False) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    try:
        if not isinstance(value, str | int | float):
            raise ValueError("not a duration")
        seconds = parse_duration(value[:_LONGEST_WORD] if isinstance(value, str) else value)
    except ValueError as error:
        message = f"`{name}`: {str(error).split(';')[0][:_LONGEST_WORD]}; write seconds or '10m'"
        raise BadRequest(message, param=name) from None
    if positive and seconds == 0:
        raise BadRequest(f"`{name}` must be above 0", param=name)
    return seconds


def _pid(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= _LARGEST_PID:
        raise BadRequest("`pid` must be the number of a process", param="pid")
    return value


def _word(fields: dict[str, object], name: str, default: str) -> str:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, str) or len(value) > _LONGEST_WORD or not (value.isprintable()):
        raise BadRequest(f"`{name}` must be a text of at most {_LONGEST_WORD} printable characters", param=name)
    return value
