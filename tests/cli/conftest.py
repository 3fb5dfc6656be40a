"""A fake daemon that answers the HTTP interface of the gateway, and a runner for the command line."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
from aiohttp import web
from tests.cli.talkable import gateway  # noqa: F401
from typer.testing import CliRunner, Result

from pagein.cli.app import app
from pagein.errors import LeaseNotFound, ModelNotFound, PageinError, UnknownPart
from pagein.gateway.parts_ports import PartsView, PartView, TaskView, ThrashView
from pagein.gateway.ports import (
    Decision,
    ModelView,
    PlannedEviction,
    PlanView,
    PoolView,
    ReloadView,
    RoomView,
    StatusView,
)

GIB = 1024**3
MIB = 1024**2


def model_view(name: str, **changes: Any) -> ModelView:
    """Return a plausible model that is not loaded, with changes."""
    view = ModelView(
        name=name,
        engine="llama_cpp",
        engine_version="xllamacpp 1.0",
        capabilities=["chat", "completion"],
        state="absent",
        priority="medium",
        pinned=False,
        device="cpu",
        context=4096,
        need={"ram": 541 * MIB},
        need_source="estimated",
        need_explanation="weights 491 MiB + KV 24 MiB + runtime 90 MiB, × 1.2",
        estimate={"ram": 541 * MIB},
        held={},
        measured=None,
        peak=None,
        leases=0,
        waiting=0,
        uses=0,
        loads=0,
        idle_seconds=None,
        load_seconds=None,
        pid=None,
        last_reason="",
        problem=None,
        retry_in_seconds=None,
    )
    return replace(view, **changes)


def part_view(name: str, **changes: Any) -> PartView:
    """Return a part that is on the disk alone, with changes."""
    view = PartView(
        name=name,
        role="adapter",
        tasks=[name],
        state="cold",
        bytes=0,
        file_bytes=2 * MIB,
        precision="stored",
        digest="ab" * 32,
        leases=0,
        pinned=False,
        stands_for=None,
        idle_seconds=None,
        loads=0,
        evictions=0,
        load_seconds=None,
        last_error=None,
    )
    return replace(view, **changes)


def parts_view(**changes: Any) -> PartsView:
    """Return an office assistant that is loaded, with two of its four parts in memory."""
    tasks = ["email", "grammar", "summarise"]
    hot = {"state": "hot", "loads": 1, "load_seconds": 0.25}
    parts = [
        part_view("backbone", role="backbone", tasks=tasks, bytes=257 * MIB, file_bytes=257 * MIB, leases=1, **hot),
        part_view("email", bytes=2 * MIB, idle_seconds=12.0, **hot),
        part_view("grammar", evictions=2, loads=2),
        part_view("summarise"),
    ]
    parts[0] = replace(parts[0], pinned=True)
    does = {name: TaskView("generate", ["backbone", name], ["chat", "completion"]) for name in tasks}
    view = PartsView(
        level="auto",
        percent=100.0,
        plan="cd" * 32,
        allowance=300 * MIB,
        owned=259 * MIB,
        waiting=0,
        thrash=ThrashView(1, 0, 20, 0.25, [], False),
        age_seconds=0.1,
        tasks=does,
        parts=parts,
    )
    return replace(view, **changes)


def assistant(**changes: Any) -> ModelView:
    """Return that assistant as a model."""
    held = {"ram": 800 * MIB}
    view = model_view("assistant", engine="parts", state="resident", held=held, need=held, parts=parts_view())
    return replace(view, **changes)


def five_models() -> list[ModelView]:
    """Return five models in five states."""
    held = {"ram": 512 * MIB}
    return [
        model_view(
            "chat",
            state="resident",
            held=held,
            peak=held,
            leases=1,
            waiting=2,
            uses=41,
            loads=3,
            load_seconds=1.35,
            idle_seconds=0.0,
            need_source="measured",
            need=held,
            pid=4242,
            pinned=True,
        ),
        model_view(
            "embed",
            state="loading",
            engine="onnx",
            capabilities=["embedding"],
            held={"ram": 131 * MIB},
            waiting=1,
            need={"ram": 131 * MIB},
        ),
        model_view(
            "speech-moonshine-tiny-en",
            state="releasing",
            engine="onnx",
            capabilities=["transcription"],
            held={"ram": 160 * MIB},
            idle_seconds=252.0,
            need={"ram": 160 * MIB},
            need_source="measured",
            priority="low",
        ),
        model_view("vit", engine="onnx", capabilities=["saliency", "classification"], need={"ram": 210 * MIB}),
        model_view(
            "rerank",
            state="failed",
            engine="onnx",
            capabilities=["rerank"],
            need={"ram": 98 * MIB},
            problem="the worker died before it was ready: exit status 1",
            retry_in_seconds=12.0,
        ),
    ]


def status_view(models: list[ModelView] | None = None) -> StatusView:
    """Return a daemon with one pool and five models."""
    pool = PoolView(
        name="ram",
        budget=1 * GIB,
        own=60 * MIB,
        reserved=131 * MIB,
        resident=512 * MIB,
        releasing=160 * MIB,
        free=161 * MIB,
        measured=640 * MIB,
        highest_measured=811 * MIB,
        available=9 * GIB,
        source="configured 1.0 GiB",
    )
    models = five_models() if models is None else models
    return StatusView("0.1.0", 4000, "http://127.0.0.1:7311", "running", 7525.0, [pool], models)


def decisions() -> list[Decision]:
    """Return a short history with an eviction in it."""
    start = time.time() - 60
    return [
        Decision(1, start, "load", "chat", "needs 512 MiB of ram, 964 MiB are free", 1, {"bytes": 512 * MIB}),
        Decision(2, start + 1.4, "ready", "chat", "loaded in 1.4 s, took 498 MiB of the reserved 541 MiB"),
        Decision(3, start + 1.5, "grant", "chat", "resident", 1),
        Decision(4, start + 1.6, "grant", "chat", "resident", 2),
        Decision(
            5,
            start + 9,
            "stop",
            "speech-moonshine-tiny-en",
            "idle for 4m12s, low priority, cheapest to bring back: 0.4 s for 160 MiB; embed needs 131 MiB",
            None,
            {"evicted_for": "embed", "bytes": 160 * MIB},
        ),
        Decision(6, start + 9.5, "wait", "embed", "waits for 131 MiB of ram, 27 MiB are free", 3),
    ]


class FakeDaemon:
    """The gateway's interface over canned values; remembers what it was asked."""

    def __init__(self) -> None:
        self.status = status_view()
        self.history = decisions()
        self.log = "line 1\nline 2\nline 3\n"
        self.logs: list[str] = []
        self.fail: PageinError | None = None
        self.refuse = False
        self.live: list[Decision] = []
        self.seen: list[tuple[str, Any]] = []
        self.answers: dict[str, Any] = {}
        self.keys: list[str | None] = []
        self.url = ""
        self.rooms: dict[str, RoomView] = {}
        self.waits_for: str | None = None
        """What leases wait for; None gives them at once."""
        self.left = 0
        """Leases whose client went away while it waited."""
        self.parts = parts_view()
        self.reloaded = ReloadView([], [], [], ["chat"], [], [])

    def application(self) -> web.Application:
        """Return the routes."""
        site = web.Application(middlewares=[self._guard])
        site.router.add_get("/api/status", self._status)
        site.router.add_get("/api/plan", self._plan)
        site.router.add_get("/api/decisions", self._decisions)
        site.router.add_get("/api/events", self._events)
        site.router.add_get("/api/models/{name}/log", self._log)
        site.router.add_post("/api/models/{name}/allowance", self._allow)
        site.router.add_get("/api/models/{name}/parts", self._parts)
        site.router.add_post("/api/models/{name}/rollout", self._parts)
        site.router.add_post("/api/models/{name}/parts/{verb}", self._parts)
        site.router.add_post("/api/models/{name}/parts/{part}/{verb}", self._parts)
        site.router.add_post("/api/models/{name}/{verb}", self._act)
        site.router.add_post("/api/reload", self._reload)
        site.router.add_get("/api/leases", self._list_rooms)
        site.router.add_post("/api/leases", self._take_room)
        site.router.add_delete("/api/leases/{id}", self._give_room_back)
        site.router.add_post("/v1/{rest:.*}", self._run)
        return site

    @web.middleware
    async def _guard(self, request: web.Request, handler: Callable[[web.Request], Any]) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization"))
        if self.refuse and request.transport is not None:
            request.transport.abort()
        try:
            if self.fail is not None:
                raise self.fail
            return await handler(request)
        except PageinError as error:
            body = {"message": error.message, "code": error.code, "hint": error.hint, **error.details}
            return web.json_response({"error": body}, status=error.http_status)

    def _known(self, name: str) -> str:
        names = [model.name for model in self.status.models]
        if name not in names:
            raise ModelNotFound(name, names)
        return name

    async def _status(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.status))

    async def _plan(self, request: web.Request) -> web.Response:
        model = self._known(request.query["model"])
        leaver = PlannedEviction("chat", {"ram": 512 * MIB}, "idle for 3.0 s, medium priority, 1.4 s to bring back")
        need, free = {"ram": 210 * MIB}, {"ram": 161 * MIB}
        view = PlanView(model, "evict", need, free, [leaver], "needs 210 MiB of ram, 161 MiB are free")
        return web.json_response(asdict(view))

    async def _decisions(self, request: web.Request) -> web.Response:
        model = request.query.get("model")
        if model is not None:
            self._known(model)
        kept = [d for d in self.history if model in (None, d.model)][-int(request.query["limit"]) :]
        return web.json_response({"decisions": [asdict(d) for d in kept]})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": hello\n\n")
        for decision in self.live:
            await response.write(f"data: {json.dumps(asdict(decision))}\n\n".encode())
        return response

    async def _log(self, request: web.Request) -> web.Response:
        self._known(request.match_info["name"])
        if self.logs:
            self.log = self.logs.pop(0)
        lines = self.log.splitlines(keepends=True)[-int(request.query["lines"]) :]
        return web.Response(text="".join(lines))

    async def _act(self, request: web.Request) -> web.Response:
        name, verb = self._known(request.match_info["name"]), request.match_info["verb"]
        self.seen.append((verb, name))
        changes = {
            "load": {"state": "resident", "held": {"ram": 210 * MIB}, "load_seconds": 0.5},
            "unload": {"state": "absent", "held": {}},
            "pin": {"pinned": True},
            "unpin": {"pinned": False},
        }[verb]
        models = [replace(m, **changes) if m.name == name else m for m in self.status.models]
        self.status = replace(self.status, models=models)
        if verb == "load":
            seq = self.history[-1].seq + 1
            self.history.append(Decision(seq, time.time(), "stop", "chat", "room", None, {"evicted_for": name}))
        return web.json_response({"ok": True})

    async def _allow(self, request: web.Request) -> web.Response:
        name, wish = self._known(request.match_info["name"]), await request.json()
        self.seen.append(("allowance", wish))
        view = next(model for model in self.status.models if model.name == name)
        return web.json_response({**asdict(view), "plan": ["12 of 48 blocks resident", "memory 2.0 GiB"]})

    async def _parts(self, request: web.Request) -> web.Response:
        self._known(request.match_info["name"])
        known = [part.name for part in self.parts.parts]
        if request.match_info.get("part", known[0]) not in known:
            raise UnknownPart(request.match_info["part"], known)
        if request.method == "POST":
            self.seen.append((request.path, await request.json()))
        return web.json_response(asdict(self.parts))

    async def _reload(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(self.reloaded))

    async def _list_rooms(self, request: web.Request) -> web.Response:
        return web.json_response({"leases": [asdict(room) for room in self.rooms.values()]})

    async def _take_room(self, request: web.Request) -> web.Response:
        wish = await request.json()
        self.seen.append(("lease", wish))
        room = RoomView(
            f"lease-{len(self.rooms) + 1}", wish["pool"], wish["bytes"], "waiting", wish["holder"], wish["pid"],
            wish.get("ttl"), self.waits_for or "it fits",
        )  # fmt: skip
        self.rooms[room.id] = room
        try:
            while self.waits_for is not None:
                self.rooms[room.id] = replace(room, reason=self.waits_for)
                await asyncio.sleep(0.01)
        except asyncio.CancelledError:
            self.left += 1
            del self.rooms[room.id]
            raise
        self.rooms[room.id] = replace(room, state="held")
        return web.json_response(asdict(self.rooms[room.id]), status=201)

    async def _give_room_back(self, request: web.Request) -> web.Response:
        if self.rooms.pop(request.match_info["id"], None) is None:
            raise LeaseNotFound("there is no such lease")
        return web.Response(status=204)

    async def _run(self, request: web.Request) -> web.StreamResponse:
        if request.content_type == "multipart/form-data":
            form = await request.post()
            body: Any = {k: v.file.read() if isinstance(v, web.FileField) else v for k, v in form.items()}
        else:
            body = await request.json()
        self.seen.append((request.path, body))
        self._known(body["model"].partition(":")[0])
        answer = self.answers[request.path]
        if not body.get("stream"):
            return web.json_response(answer)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b": waiting for memory\n\n")
        for event in answer:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        return response


@pytest.fixture(scope="session")
def _loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    yield loop
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def daemon(_loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDaemon]:
    """A fake daemon on a free port, which ``$PAGEIN_URL`` names."""
    fake = FakeDaemon()
    runner = web.AppRunner(fake.application(), handler_cancellation=True)

    async def start() -> int:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    port = asyncio.run_coroutine_threadsafe(start(), _loop).result()
    fake.url = f"http://127.0.0.1:{port}"
    monkeypatch.setenv("PAGEIN_URL", fake.url)
    yield fake
    asyncio.run_coroutine_threadsafe(runner.cleanup(), _loop).result()


@pytest.fixture
def pagein(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Callable[..., Result]:
    """Run the command line in an empty folder and return what it printed and its exit code."""
    monkeypatch.chdir(tmp_path)
    for name in ("PAGEIN_CONFIG", "PAGEIN_DEBUG", "PAGEIN_STATE_DIR", "PAGEIN_SERVER__API_KEY", "COLUMNS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)

    def run(*args: str, **options: Any) -> Result:
        return CliRunner().invoke(app, list(args), prog_name="pagein", **options)

    return run


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Let no daemon be found."""
    monkeypatch.setenv("PAGEIN_URL", "http://127.0.0.1:9")
