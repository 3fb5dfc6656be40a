"""A desk and workers that tests control, and a client that can leave in the middle of anything."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

from aiohttp import web

from pagein.errors import CapabilityMissing, LeaseNotFound, ModelNotFound, PageinError, WorkerDied
from pagein.gateway.ports import (
    Decision,
    Lease,
    ModelView,
    PlanView,
    PoolView,
    Prepared,
    ReloadView,
    RoomView,
    StatusView,
)
from pagein.gateway.snapshot_ports import Snapshots
from pagein.history import TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import PATHS, Capability, Endpoint
from tests.gateway.splits import FakeSplit

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
ANSWER = b'{"ok": true,  "text": "\xc3\xa9"}'
EVENTS = [b'data: {"choices": [{"delta": {"content": "one"}}]}\n\n', b'data: {"usage": {}}\n\n', b"data: [DONE]\n\n"]


def view_of(name: str, capabilities: list[str], **changes: object) -> ModelView:
    """Return a resident model with plausible numbers."""
    values: dict[str, object] = {
        "name": name, "engine": "fake", "engine_version": "1", "capabilities": capabilities, "state": "resident",
        "priority": "medium", "pinned": False, "device": "cpu", "context": 4096, "need": {"ram": 1000},
        "need_source": "measured", "need_explanation": "", "estimate": {"ram": 900}, "held": {"ram": 1000},
        "measured": {"ram": 950}, "peak": None, "leases": 0, "waiting": 0, "uses": 3, "loads": 2,
        "idle_seconds": 1.0, "load_seconds": 0.5, "pid": 7, "last_reason": "asked for", "problem": None,
        "retry_in_seconds": None,
    }  # fmt: skip
    return ModelView(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class FakeDesk:
    """A desk whose answers a test decides; it counts what was taken and given back."""

    models: dict[str, list[Capability]] = field(default_factory=lambda: {"m": list(Capability)})
    endpoint: Endpoint = field(default_factory=lambda: Endpoint(socket="/nowhere"))
    timeout: float = 30.0
    lease_facts: dict[str, object] = field(default_factory=dict)
    refusal: PageinError | None = None
    why: PageinError = field(default_factory=lambda: WorkerDied("the worker of 'm' ended: exit code 9: out of memory"))
    log: str = "/nowhere"
    view_facts: dict[str, object] = field(default_factory=dict)
    """Changes of every model's view."""
    prepared: Prepared = field(default_factory=lambda: Prepared(b""))
    """What `prepare` gives, with the body that it got."""
    accounted: list[tuple[Prepared, Counted | None]] = field(default_factory=list)
    turns: list[TurnOf | None] = field(default_factory=list)
    """Whose turn each request was, as `prepare` was told."""
    computed: list[bool] = field(default_factory=list)
    """Of each request: whether its answer had begun."""
    printed: dict[str, list[str]] = field(default_factory=dict)
    """Last lines of output, by model."""
    snapshots: Snapshots | None = None
    """None: `state` is off."""
    split: FakeSplit = field(default_factory=FakeSplit)

    def __post_init__(self) -> None:
        self.gate = asyncio.Event()
        """Closed (clear) = everyone waits."""
        self.gate.set()
        self.asked = asyncio.Queue[Callable[[str, int], None] | None]()
        """One entry for each acquire that began: its on_wait."""
        self.granted: list[int] = []
        self.given_up = 0
        self.released: list[tuple[int, int]] = []
        """Lease and status."""
        self.quiet = asyncio.Event()
        """Set whenever no lease is out and nobody waits."""
        self.waiting = 0
        self.acts: list[tuple[str, str]] = []
        self.keep_alives: list[float | None] = []
        """One entry for each acquire that began."""
        self.wishes: list[tuple[str, int, float | None, float | None, int | None, str]] = []
        """What outsiders asked for."""
        self.rooms: dict[str, RoomView] = {}
        self.reloaded = ReloadView([], [], [], list(self.models), [], [])
        self.past: list[Decision] = []
        self.streams: set[asyncio.Queue[Decision | None]] = set()

    async def acquire(
        self,
        model: str,
        capability: Capability,
        on_wait: Callable[[str, int], None] | None = None,
        keep_alive: float | None = None,
    ) -> Lease:
        if capability not in self.capabilities(model):
            raise CapabilityMissing(model, capability.value, [c.value for c in self.models[model]])
        self.waiting += 1
        self.quiet.clear()
        self.asked.put_nowait(on_wait)
        self.keep_alives.append(keep_alive)
        await self._gate()
        number = len(self.granted) + 1
        self.granted.append(number)
        self.quiet.clear()
        facts = {"waited_seconds": 0.0, "load_seconds": None, "context": None, **self.lease_facts}
        return Lease(request_id=number, model=model, endpoint=self.endpoint, timeout=self.timeout, **facts)  # type: ignore[arg-type]

    async def _gate(self) -> None:
        """Wait until the gate is open, and raise the refusal where there is one."""
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        finally:
            self.waiting -= 1
            self._settle()
        if self.refusal is not None:
            raise self.refusal

    def release(self, lease: Lease, status: int, seconds: float) -> None:
        assert seconds >= 0
        self.released.append((lease.request_id, status))
        self._settle()

    def _settle(self) -> None:
        if not self.waiting and len(self.released) >= len(self.granted):
            self.quiet.set()

    async def settled(self) -> list[int]:
        """Wait until nothing is held and return the statuses; fails unless each lease came back exactly once."""
        async with asyncio.timeout(10):
            await self.quiet.wait()
        assert sorted(number for number, _ in self.released) == self.granted
        return [status for _, status in self.released]

    async def settled_or_untouched(self) -> list[int]:
        """Like `settled`, also right when nothing was ever asked for."""
        return await self.settled() if self.granted or self.waiting else []

    async def why_gone(self, lease: Lease) -> PageinError:
        return self.why

    async def prepare(self, lease: Lease, path: str, body: bytes, turn: TurnOf | None = None) -> Prepared:
        self.turns.append(turn)
        return replace(self.prepared, body=body)

    def account(self, lease: Lease, prepared: Prepared, counted: Counted | None, computed: bool = False) -> None:
        self.accounted.append((prepared, counted))
        self.computed.append(computed)

    def last_lines(self, model: str) -> list[str]:
        return self.printed.get(model, [])

    def names(self) -> list[str]:
        return list(self.models)

    def capabilities(self, model: str) -> frozenset[Capability]:
        if model not in self.models:
            raise ModelNotFound(model, self.names())
        return frozenset(self.models[model])

    def status(self) -> StatusView:
        views = [view_of(name, [c.value for c in does], **self.view_facts) for name, does in self.models.items()]
        pool = PoolView("ram", 4000, 100, 200, 1000, 300, 2400, 1500, None, None, "configured 4000 B")
        return StatusView("1.2", 1, "127.0.0.1:1", "running", 5.0, [pool], views, rooms=list(self.rooms.values()))

    def plan(self, model: str) -> PlanView:
        self.capabilities(model)
        return PlanView(model, "load", {"ram": 1000}, {"ram": 2400}, [], "it fits")

    def decisions(self, model: str | None = None, limit: int = 100) -> list[Decision]:
        if model is not None:
            self.capabilities(model)
        return [d for d in self.past if model in (None, d.model)][-limit:]

    async def subscribe(self) -> AsyncIterator[Decision]:
        queue = asyncio.Queue[Decision | None]()
        self.streams.add(queue)
        try:
            while (decision := await queue.get()) is not None:
                yield decision
        finally:
            self.streams.discard(queue)

    def decide(self, kind: str, model: str | None, **data: object) -> Decision:
        """Make a decision that subscribers see."""
        decision = Decision(len(self.past) + 1, time.time(), kind, model, f"because of {kind}", data=data)
        self.past.append(decision)
        for queue in self.streams:
            queue.put_nowait(decision)
        return decision

    async def load(self, model: str) -> None:
        self.acts.append(("load", model))
        if self.refusal is not None:
            raise self.refusal

    async def unload(self, model: str) -> None:
        self.acts.append(("unload", model))

    async def take_room(
        self, pool: str, count: int, ttl: float | None, wait: float | None, pid: int | None, holder: str
    ) -> RoomView:
        self.wishes.append((pool, count, ttl, wait, pid, holder))
        self.waiting += 1
        self.quiet.clear()
        await self._gate()
        room = RoomView(f"r{len(self.wishes)}", pool, count, "held", holder, pid, ttl, "it fits")
        self.rooms[room.id] = room
        return room

    def give_room_back(self, room: str) -> None:
        if self.rooms.pop(room, None) is None:
            raise LeaseNotFound(f"there is no lease {room!r}")

    def extend_room(self, room: str, ttl: float | None) -> RoomView:
        if room not in self.rooms:
            raise LeaseNotFound(f"there is no lease {room!r}")
        self.rooms[room] = replace(self.rooms[room], expires_in_seconds=ttl)
        return self.rooms[room]

    async def reload(self) -> ReloadView:
        if self.refusal is not None:
            raise self.refusal
        return self.reloaded

    async def set_allowance(self, model: str, count: int, pool: str | None = None) -> tuple[str, ...]:
        """Write down what was wished."""
        self.acts.append((f"allow {count}" + (f" of {pool}" if pool else ""), model))
        return ("3 of 6 blocks resident",)

    def set_pin(self, model: str, pinned: bool) -> None:
        self.capabilities(model)
        self.acts.append(("pin" if pinned else "unpin", model))

    def log_path(self, model: str) -> str:
        self.capabilities(model)
        return self.log


@dataclass
class FakeWorker:
    """Answers every path of a worker as a test says, and remembers what it got."""

    answer: Handler | None = None
    requests: list[tuple[str, bytes, dict[str, str]]] = field(default_factory=list)
    arrived: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    left: asyncio.Queue[str] = field(default_factory=asyncio.Queue)
    """Paths whose caller went away before the answer was complete."""
    connections: set[int] = field(default_factory=set)

    async def busy(self) -> str:
        """Wait until a request arrives and return its path."""
        async with asyncio.timeout(10):
            return await self.arrived.get()

    async def deserted(self) -> str:
        """Wait until a caller has left and return the path of its request."""
        async with asyncio.timeout(10):
            return await self.left.get()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append((request.path, body, dict(request.headers)))
        self.connections.add(id(request.transport))
        self.arrived.put_nowait(request.path)
        try:
            return await (self.answer or self.plain)(request)
        except (asyncio.CancelledError, ConnectionError):
            self.left.put_nowait(request.path)
            raise

    async def plain(self, request: web.Request) -> web.Response:
        return web.Response(body=ANSWER, content_type="application/json")

    @staticmethod
    async def events(request: web.Request) -> web.StreamResponse:
        return await stream(request, *EVENTS)

    @staticmethod
    async def silent(request: web.Request) -> web.StreamResponse:
        """Never answer."""
        await asyncio.Event().wait()
        raise AssertionError

    @staticmethod
    async def stuck(request: web.Request) -> web.StreamResponse:
        """Send the first half of an answer and then nothing."""
        response = await begin(request)
        await response.write(EVENTS[0])
        await asyncio.Event().wait()
        raise AssertionError

    def app(self) -> web.Application:
        app = web.Application(client_max_size=0)
        for path in PATHS.values():
            app.router.add_post(path, self.handle)
        return app


async def begin(request: web.Request, content_type: str = "text/event-stream") -> web.StreamResponse:
    """Send the headers of a stream."""
    response = web.StreamResponse(headers={"Content-Type": content_type})
    await response.prepare(request)
    return response


async def stream(request: web.Request, *chunks: bytes) -> web.StreamResponse:
    """Send a whole stream, chunk by chunk."""
    response = await begin(request)
    for chunk in chunks:
        await response.write(chunk)
    await response.write_eof()
    return response


async def die(request: web.Request, *chunks: bytes, content_type: str = "text/event-stream") -> web.StreamResponse:
    """Send the beginning of a stream and then end as a killed process does."""
    if chunks:
        response = await begin(request, content_type)
        for chunk in chunks:
            await response.write(chunk)
    assert request.transport is not None
    request.transport.close() if chunks else request.transport.abort()
    raise asyncio.CancelledError


async def eventually(holds: Callable[[], bool]) -> None:
    """Let the other tasks run until something holds."""
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0)


class RawClient:
    """One HTTP connection by hand: leaves whenever a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def connect(cls, port: int) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def send(
        self, path: str, body: bytes, content_type: str = "application/json", *, cut: int = 0, method: str = "POST"
    ) -> None:
        """Send a request, less its last ``cut`` bytes."""
        fields = ("Host: localhost", f"Content-Type: {content_type}", f"Content-Length: {len(body)}")
        head = "\r\n".join((f"{method} {path} HTTP/1.1", *fields, "", ""))
        self._writer.write(head.encode() + body[: len(body) - cut])
        await self._writer.drain()

    async def until(self, mark: bytes) -> bytes:
        """Read up to and with the mark."""
        async with asyncio.timeout(10):
            return await self._reader.readuntil(mark)

    async def rest(self) -> bytes:
        """Read until the server ends the connection."""
        async with asyncio.timeout(10):
            return await self._reader.read()

    async def leave(self) -> None:
        """End the connection."""
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()


def request_for(path: str, model: str = "m", *, stream: bool = False) -> tuple[bytes, str]:
    """Return a body and a content type that the path accepts."""
    if path == PATHS[Capability.TRANSCRIPTION]:
        parts = [('name="model"', model), ('name="file"; filename="a.wav"', "RIFF\x00--")]
        text = "".join(f"--B\r\nContent-Disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts)
        return f"{text}--B--\r\n".encode(), "multipart/form-data; boundary=B"
    if path.startswith("/run/"):
        return json.dumps({"input": "hello", "stream": stream}).encode(), "application/json"
    return json.dumps({"model": model, "input": "hello", "stream": stream}).encode(), "application/json"


ALL_PATHS = [*PATHS.values(), "/rerank", "/run/m"]
STREAM_PATHS = [PATHS[Capability.CHAT], PATHS[Capability.COMPLETION], "/run/m"]
