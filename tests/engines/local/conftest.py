"""A server with a tiny model in memory, and a client on its socket."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pagein.engines.local.model import LocalModel
from pagein.engines.local.serve import LocalServer
from pagein.protocol import Endpoint, WorkerSpec


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    """A folder with a short path: Unix sockets take about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        yield Path(folder)


@dataclass
class Reply:
    """An HTTP answer, read whole."""

    status: int
    body: Any
    """Parsed JSON, or text."""
    headers: dict[str, str]

    @property
    def error(self) -> dict[str, Any]:
        """The error object of an OpenAI-shaped answer."""
        return self.body["error"]


async def request(endpoint: Endpoint, method: str, path: str, **arguments: Any) -> Reply:
    """Ask once over the socket."""
    connector = aiohttp.UnixConnector(path=endpoint.socket or "")
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(method, f"http://worker{path}", **arguments) as response,
    ):
        is_json = response.content_type == "application/json"
        body = await (response.json() if is_json else response.text())
        return Reply(response.status, body, dict(response.headers))


Start = Callable[..., Endpoint]
Ask = Callable[..., Awaitable[Reply]]


@pytest.fixture
def start(socket_dir: Path) -> Iterator[Start]:
    """Start a server for a model; stopped after the test."""
    servers: list[LocalServer] = []

    def act(model: LocalModel, parallel: int = 4) -> Endpoint:
        spec = WorkerSpec(name="tiny", engine="test", token="t", socket_dir=str(socket_dir), parallel=parallel)
        servers.append(LocalServer(spec, model))
        return servers[-1].start()

    yield act
    for server in servers:
        server.stop()


@pytest.fixture
def ask(start: Start) -> Ask:
    """Post to a model's endpoint."""

    async def act(model: LocalModel, path: str, **arguments: Any) -> Reply:
        return await request(start(model), "POST", path, **arguments)

    return act
