"""The daemon as the command line sees it: one method per question, errors as the daemon's own classes."""

from __future__ import annotations

import asyncio
import difflib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import quote

import aiohttp

from pagein.cli.address import KEY_VARIABLE, Daemon
from pagein.cli.decode import (
    allowance_of,
    decision_of,
    error_of,
    parts_of,
    plan_of,
    reload_of,
    removed_of,
    room_of,
    rooms_of,
    saved_of,
    status_of,
    stranger,
    thread_of,
    threads_of,
    verified_of,
)
from pagein.errors import ConversationNotFound, DaemonUnreachable, ModelNotFound, PageinError, Unauthorized
from pagein.gateway.parts_ports import PartsView
from pagein.gateway.ports import Decision, ModelView, PlanView, ReloadView, RoomView, StatusView
from pagein.gateway.snapshot_ports import Removed, SavedView, Verified
from pagein.history import Thread

T = TypeVar("T")
_CONNECT_SECONDS = 5.0
_ANSWER_SECONDS = 30.0
"""For questions that the daemon answers at once; loads and runs are bounded by the daemon instead."""


def call(daemon: Daemon, work: Callable[[Client], Awaitable[T]]) -> T:
    """Run ``work`` with a connected client and return its result; raises PageinError."""

    async def talk() -> T:
        async with Client(daemon) as client:
            return await work(client)

    return asyncio.run(talk())


class Client:
    """HTTP to one daemon. Every method raises DaemonUnreachable, or the error that the daemon answered with."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self._daemon.key}"} if self._daemon.key else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS)
        self._session = aiohttp.ClientSession(headers=headers, timeout=timeout)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def status(self) -> StatusView:
        """Return everything at this moment."""
        return status_of(await self._ask("/api/status"))

    async def plan(self, model: str) -> PlanView:
        """Return what loading the model now would do."""
        return plan_of(await self._ask("/api/plan", model=model))

    async def decisions(self, model: str | None, limit: int) -> list[Decision]:
        """Return the last decisions, oldest first, of one model or of all."""
        wanted = {"limit": str(limit)} | ({"model": model} if model is not None else {})
        body = await self._ask("/api/decisions", **wanted)
        return [decision_of(item) for item in body["decisions"]]

    async def events(self) -> AsyncIterator[Decision]:
        """Yield every decision from now on, until the daemon stops."""
        async with self._open("GET", "/api/events") as response:
            async for data in _sse(response):
                yield decision_of(json.loads(data))

    async def act(self, model: str, verb: str) -> None:
        """Load, unload, pin or unpin; returns when the daemon has done it."""
        async with self._open("POST", f"/api/models/{quote(model, safe='')}/{verb}"):
            pass

    async def set_allowance(self, model: str, count: int, pool: str | None) -> tuple[ModelView, list[str]]:
        """Let a loaded model live with other bytes; returns how it stands and its worker's new plan, once it does."""
        wish: dict[str, object] = {"memory": count} | ({"pool": pool} if pool is not None else {})
        return allowance_of(await self.post(f"/api/models/{quote(model, safe='')}/allowance", wish))

    async def parts(self, model: str) -> PartsView:
        """Return the parts of a split model as they are now; loads nothing."""
        return parts_of(await self._ask(f"/api/models/{quote(model, safe='')}/parts"))

    async def act_on_parts(self, model: str, *path: str, **wish: object) -> PartsView:
        """Have something done with a split model's parts (``backbone``, ``load``); returns how they are then."""
        where = "/".join(quote(step, safe="") for step in (model, *path))
        return parts_of(await self.post(f"/api/models/{where}", wish))

    async def reload(self) -> ReloadView:
        """Let the daemon read its configuration again; returns what changed."""
        return reload_of(await self.post("/api/reload", {}))

    async def rooms(self) -> list[RoomView]:
        """Return the leases of memory, those included that still wait."""
        return rooms_of(await self._ask("/api/leases"))

    async def take_room(self, wish: dict[str, object]) -> RoomView:
        """Wait for a lease of memory; a call that is cancelled takes the wish back."""
        return room_of(await self.post("/api/leases", wish))

    async def give_room_back(self, room: str) -> None:
        """End a lease of memory."""
        async with self._open("DELETE", f"/api/leases/{quote(room, safe='')}"):
            pass

    async def log(self, model: str, lines: int) -> str:
        """Return the last lines of a model's log."""
        path = f"/api/models/{quote(model, safe='')}/log"
        async with self._open("GET", path, params={"lines": str(lines)}) as response:
            return await response.text(errors="replace")

    async def post(self, path: str, body: dict[str, object] | aiohttp.FormData) -> Any:
        """Send one request and return the JSON that it answers."""
        payload = {"data": body} if isinstance(body, aiohttp.FormData) else {"json": body}
        async with self._open("POST", path, **payload) as response:
            return await response.json(content_type=None)

    async def threads(self) -> list[Thread]:
        """Return the conversations that are kept, last used first."""
        return threads_of(await self._ask("/api/state/conversations"))

    async def thread(self, name: str) -> Thread | None:
        """Return a conversation by its id, or a session by its name; None where there is none."""
        try:
            return thread_of(await self._ask(f"/api/state/conversations/{quote(name, safe='')}"))
        except ConversationNotFound:
            return None

    async def forget(self, thread: str) -> None:
        """Delete a conversation by its id, or a session by its name."""
        async with self._open("DELETE", f"/api/state/conversations/{quote(thread, safe='')}"):
            pass

    async def export(self, thread: str | None) -> AsyncIterator[bytes]:
        """Yield one conversation, or all, as lines of JSON."""
        query = {"conversation": thread} if thread is not None else {}
        async with self._open("GET", "/api/state/export", params=query) as response:
            async for chunk in response.content.iter_any():
                yield chunk

    async def saved(self) -> SavedView:
        """Return the snapshots, and what was reused of them."""
        return saved_of(await self._ask("/api/state"))

    async def kv_reports(self) -> dict[str, dict[str, Any]]:
        """Return what workers that keep KV caches by themselves report of them, by model."""
        body = await self._ask("/api/state/kv")
        models = body.get("models") if isinstance(body, dict) else None
        if not isinstance(models, dict):
            raise stranger("the answer has no reports of KV caches")
        return models

    async def forget_snapshot(self, snapshot: str) -> None:
        """Remove a snapshot."""
        async with self._open("DELETE", f"/api/state/snapshots/{quote(snapshot, safe='')}"):
            pass

    async def forget_snapshots(self) -> Removed:
        """Remove all snapshots."""
        async with self._open("DELETE", "/api/state/snapshots") as response:
            return removed_of(await response.json(content_type=None))

    async def verify(self, snapshot: str | None) -> Verified:
        """Have a snapshot, or all, read through; takes as long as reading does."""
        return verified_of(await self.post("/api/state/verify", {"id": snapshot} if snapshot is not None else {}))

    async def verify_blocks(self, model: str, after: str | None) -> Verified:
        """Have KV blocks of a model read through for some seconds, from a place on."""
        return verified_of(await self.post("/api/state/verify", {"blocks": model, "after": after}))

    async def collect_garbage(self, idle: float | None) -> Removed:
        """Have leftovers swept, and snapshots removed that are idle for longer."""
        return removed_of(await self.post("/api/state/gc", {"idle": idle} if idle is not None else {}))

    async def stream(
        self, path: str, body: dict[str, object], headers: dict[str, str] | None = None
    ) -> AsyncIterator[Any]:
        """Send one request to a model and yield the JSON events that it streams."""
        async with self._open("POST", path, json=body, headers=headers) as response:
            async for data in _sse(response):
                event = json.loads(data)
                if isinstance(event, dict) and "error" in event:
                    raise error_of(event, response.status)
                yield event

    async def _ask(self, path: str, **query: str) -> Any:
        try:
            async with asyncio.timeout(_ANSWER_SECONDS), self._open("GET", path, params=query) as response:
                return await response.json(content_type=None)
        except TimeoutError as error:
            raise self._lost(error, False) from error

    @asynccontextmanager
    async def _open(self, method: str, path: str, **request: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        answered = False
        try:
            async with self._session.request(method, self._daemon.url + path, **request) as response:
                answered = True
                if response.status >= 400:
                    raise await self._refusal(response)
                yield response
        except json.JSONDecodeError as error:
            raise stranger(f"its answer is no JSON: {error}") from error
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._lost(error, answered) from error

    def _lost(self, error: Exception, answered: bool) -> DaemonUnreachable:
        if answered:
            return DaemonUnreachable(
                f"the daemon at {self._daemon.url} ended the connection in the middle of its answer",
                hint="it may have been stopped; see 'pagein ps'",
            )
        why = (_refused(error) or str(error) or "it did not answer in time").lower()
        return DaemonUnreachable(
            f"no daemon answers at {self._daemon.url} ({self._daemon.source}): {why}",
            hint="start one with 'pagein serve', or say where it is with --url",
        )

    async def _refusal(self, response: aiohttp.ClientResponse) -> PageinError:
        text = await response.text(errors="replace")
        try:
            body = json.loads(text)
        except ValueError:
            body = {"error": {"message": f"{response.status} {response.reason}: {text[:200]}"}}
        error = error_of(body, response.status)
        if isinstance(error, ModelNotFound) and error.hint is None:
            known = [view.name for view in (await self.status()).models]
            error.hint = self.suggestion(str(error.details.get("model", "")), known)
        if isinstance(error, Unauthorized):
            error.hint = f"set {KEY_VARIABLE} to the key of this daemon"
        return error

    @staticmethod
    def suggestion(model: str, known: Iterable[str]) -> str:
        """Return the hint for a name that no model has: the nearest one."""
        near = difflib.get_close_matches(model, known, n=1, cutoff=0.5)
        return f"did you mean {near[0]!r}?" if near else "see 'pagein ps'"


def _refused(error: Exception) -> str | None:
    """Return why no connection came to be, in the system's words; `os.strerror` has none for an unknown name."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return None
    number = error.os_error.errno
    return os.strerror(number) if number is not None and number > 0 else error.os_error.strerror


async def _sse(response: aiohttp.ClientResponse) -> AsyncIterator[str]:
    """Yield the data of server-sent events; comments are heartbeats, ``[DONE]`` ends the stream."""
    data: list[str] = []
    async for raw in response.content:
        line = raw.decode("utf-8", "replace").rstrip("\r\n")
        if line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            joined = "\n".join(data)
            data = []
            if joined == "[DONE]":
                return
            yield joined
