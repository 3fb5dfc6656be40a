"""Endpoints for operators: state, dry run, decisions, load and unload, logs, metrics."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from pagein.errors import BadRequest, ModelNotFound
from pagein.gateway import sse
from pagein.gateway.call import read_body
from pagein.gateway.metrics import Metrics
from pagein.gateway.openai import json_object
from pagein.gateway.ports import Decision, Desk, ModelView
from pagein.gateway.tasks import SEPARATOR, Asked, find_task
from pagein.gateway.views import as_json, as_openai_model
from pagein.units import parse_bytes

_MOST_DECISIONS = 10_000
_MOST_LINES = 10_000
_LONGEST_BODY = 64 * 1024
_TAIL_BYTES = 4 * 1024 * 1024


class Admin:
    """Handlers that ask the desk and show its answer."""

    def __init__(self, desk: Desk, metrics: Metrics, heartbeat: float) -> None:
        self._desk = desk
        self._metrics = metrics
        self._heartbeat = heartbeat
        self._created = int(time.time())

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        acts = [
            web.post(f"/api/models/{{name}}/{verb}", act)
            for verb, act in (
                ("load", self.load),
                ("unload", self.unload),
                ("pin", self.pin),
                ("unpin", self.unpin),
                ("allowance", self.allowance),
            )
        ]
        return [
            web.get("/health", self.health),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/v1/models/{name}", self.model),
            web.get("/api/status", self.status),
            web.get("/api/plan", self.plan),
            web.get("/api/decisions", self.decisions),
            web.get("/api/events", self.events),
            web.get("/api/models/{name}/log", self.log),
            web.post("/api/reload", self.reload),
            *acts,
        ]

    async def health(self, request: web.Request) -> web.Response:
        """Say that the daemon answers."""
        return web.json_response({"status": "ok"})

    async def metrics(self, request: web.Request) -> web.Response:
        """Show the Prometheus metrics."""
        return web.Response(body=await self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def models(self, request: web.Request) -> web.Response:
        """List the models as OpenAI does."""
        data = [as_openai_model(model, self._created) for model in self._desk.status().models]
        return web.json_response({"object": "list", "data": data})

    async def model(self, request: web.Request) -> web.Response:
        """Show one model as OpenAI does, or one task of a split model, which clients name as if it were a model."""
        named = request.match_info["name"]
        asked = find_task(self._desk, named) if SEPARATOR in named else Asked(named)
        shown = as_openai_model(self._view(asked.model), self._created)
        if asked.capabilities is not None:
            shown |= {"id": asked.name, "capabilities": sorted(asked.capabilities), "tasks": [asked.task]}
        return web.json_response(shown)

    async def status(self, request: web.Request) -> web.Response:
        """Show pools and models."""
        return web.json_response(as_json(self._desk.status()))

    async def plan(self, request: web.Request) -> web.Response:
        """Show what a request for a model would do now."""
        model = request.query.get("model")
        if not model:
            raise BadRequest("the plan needs a model: /api/plan?model=NAME", param="model")
        return web.json_response(as_json(self._desk.plan(model)))

    async def decisions(self, request: web.Request) -> web.Response:
        """Show the last decisions, of one model or of all."""
        limit = _number(request, "limit", 100, _MOST_DECISIONS)
        found = self._desk.decisions(request.query.get("model"), limit)
        return web.json_response({"decisions": [as_json(decision) for decision in found]})

    async def load(self, request: web.Request) -> web.Response:
        """Load a model and answer when it is there."""
        name = self._view(request.match_info["name"]).name
        await self._desk.load(name)
        return web.json_response(as_json(self._view(name)))

    async def unload(self, request: web.Request) -> web.Response:
        """Unload a model and answer when its memory is back."""
        name = self._view(request.match_info["name"]).name
        await self._desk.unload(name)
        return web.json_response(as_json(self._view(name)))

    async def pin(self, request: web.Request) -> web.Response:
        """Keep a model from being evicted."""
        return self._set_pin(request, True)

    async def unpin(self, request: web.Request) -> web.Response:
        """Allow a model to be evicted again."""
        return self._set_pin(request, False)

    async def allowance(self, request: web.Request) -> web.Response:
        """Let a loaded model live with other bytes, and answer when it does, with the plan that it has then."""
        name = self._view(request.match_info["name"]).name
        body = json_object(await read_body(request, _LONGEST_BODY))
        plan = await self._desk.set_allowance(name, _size(body), _pool(body))
        return web.json_response({**as_json(self._view(name)), "plan": list(plan)})

    async def reload(self, request: web.Request) -> web.Response:
        """Apply the configuration file as it is now, and show what changed."""
        return web.json_response(as_json(await self._desk.reload()))

    async def log(self, request: web.Request) -> web.Response:
        """Show the last lines of a model's log."""
        path = Path(self._desk.log_path(request.match_info["name"]))
        lines = _number(request, "lines", 100, _MOST_LINES)
        text = await asyncio.to_thread(_tail, path, lines)
        return web.Response(body=text, headers={"Content-Type": "text/plain; charset=utf-8"})

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Stream every decision; after a break, those since ``Last-Event-ID`` first."""
        model = request.query.get("model")
        if model is not None:
            self._view(model)
        response = web.StreamResponse(headers={"Content-Type": sse.CONTENT_TYPE, **sse.HEADERS})
        seen = _last_seen(request)
        async for decision in self._follow(seen):
            if not response.prepared:
                await response.prepare(request)
            if decision is None:
                await response.write(sse.comment("listening"))
            elif model is None or decision.model == model:
                await response.write(sse.event(as_json(decision), decision.seq))
        if response.prepared:
            await response.write_eof()
        return response

    async def _follow(self, seen: int | None) -> AsyncIterator[Decision | None]:
        """Yield missed decisions, then new ones; None at the start and after each heartbeat of quiet."""
        stream = self._desk.subscribe()
        coming = asyncio.ensure_future(anext(stream, None))
        try:
            await asyncio.sleep(0)  # the subscription stands before the past is read, so that nothing falls between
            yield None
            for decision in self._desk.decisions(None, _MOST_DECISIONS) if seen is not None else []:
                if decision.seq > (seen or 0):
                    seen = decision.seq
                    yield decision
            while True:
                if not (await asyncio.wait((coming,), timeout=self._heartbeat))[0]:
                    yield None
                    continue
                fresh = coming.result()
                if fresh is None:
                    return
                coming = asyncio.ensure_future(anext(stream, None))
                if fresh.seq > (seen or 0):
                    yield fresh
        finally:
            coming.cancel()

    def _set_pin(self, request: web.Request, pinned: bool) -> web.Response:
        name = request.match_info["name"]
        self._desk.set_pin(name, pinned)
        return web.json_response(as_json(self._view(name)))

    def _view(self, name: str) -> ModelView:
        for model in self._desk.status().models:
            if model.name == name:
                return model
        raise ModelNotFound(name[:64], self._desk.names())


def _last_seen(request: web.Request) -> int | None:
    given = request.headers.get("Last-Event-ID", "")
    return int(given) if given.isascii() and given.isdigit() and len(given) < 19 else None


def _number(request: web.Request, name: str, default: int, most: int) -> int:
    given = request.query.get(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
        raise BadRequest(f"`{name}` must be a number from 1 to {most}, not {given[:20]!r}", param=name)
    return int(given)


def _pool(body: Mapping[str, object]) -> str | None:
    """The pool that a body names; None where it names none."""
    value = body.get("pool")
    if value is not None and not isinstance(value, str):
        raise BadRequest("`pool` must be the name of a pool such as ram or cuda:0", param="pool")
    return value


def _size(body: Mapping[str, object]) -> int:
    """The bytes that a body wishes as ``memory``: a number, or a text like ``2GiB``."""
    value = body.get("memory")
    try:
        count = parse_bytes(value) if isinstance(value, str) else value
    except ValueError as error:
        raise BadRequest(f"`memory` is no size: {error}", param="memory") from None
    if not isinstance(count, int) or isinstance(count, bool) or not 0 < count < 2**60:
        raise BadRequest("`memory` must be a size such as 2GiB", param="memory")
    return count


def _tail(path: Path, lines: int) -> bytes:
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            text = file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return b""
    return b"".join(text.splitlines(keepends=True)[-lines:])
