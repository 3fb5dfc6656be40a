"""A gateway on a free port, in front of a worker on a Unix socket."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from pagein.config.schema import Server
from pagein.gateway.app import make_app, make_runner
from pagein.gateway.session_ports import Sessions
from pagein.protocol import Endpoint
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from tests.gateway.fakes import FakeDesk, FakeWorker

NO_HEARTBEAT = 3600.0


@dataclass
class Served:
    """A running gateway and a client for it."""

    port: int
    session: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, **more: Any) -> Any:
        return self.session.get(self.url + path, **more)

    def post(self, path: str, **more: Any) -> Any:
        return self.session.post(self.url + path, **more)


@pytest.fixture
def sessions(tmp_path: Path) -> Iterator[SessionStore]:
    """An empty store of conversations."""
    store = SessionStore.open(tmp_path / "c.sqlite", Bounds(64 * 1024**2, 1e9))
    yield store
    store.close()


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def desk() -> FakeDesk:
    """A desk that grants at once and knows the model ``m``, which can do everything."""
    return FakeDesk()


@pytest.fixture
async def worker(desk: FakeDesk) -> AsyncIterator[FakeWorker]:
    """The worker behind every lease of the desk."""
    fake = FakeWorker()
    with tempfile.TemporaryDirectory(prefix="pagein-") as folder:  # short: a socket's path is limited to 107 bytes
        path = str(Path(folder) / "worker.sock")
        runner = web.AppRunner(fake.app(), handler_cancellation=True, access_log=None, shutdown_timeout=0.01)
        await runner.setup()
        await web.UnixSite(runner, path).start()
        desk.endpoint = Endpoint(socket=path)
        yield fake
        await runner.cleanup()


@pytest.fixture
async def serve(desk: FakeDesk) -> AsyncIterator[Serve]:
    """Start a gateway with these server settings."""
    runners: list[web.AppRunner] = []
    async with aiohttp.ClientSession() as session:

        async def start(sessions: Sessions | None = None, **settings: Any) -> Served:
            server = Server(**{"heartbeat": NO_HEARTBEAT, **settings})
            runner = make_runner(make_app(desk, server, "1.2", sessions), grace=0)
            runners.append(runner)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            return Served(runner.addresses[0][1], session)

        yield start
    for runner in runners:
        await runner.cleanup()
