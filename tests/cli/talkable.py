"""A real gateway with real stores before a fake worker, for the commands that talk and look after what was said."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from aiohttp import web
from tests.gateway.fakes import FakeDesk, FakeWorker
from tests.gateway.talkers import echo
from tests.saved import saved_in

from pagein.config.schema import Server
from pagein.gateway.app import make_app, make_runner
from pagein.protocol import Endpoint
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore


class Gateway:
    """A gateway with a store, in the loop's thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.runners: list[web.AppRunner] = []
        self.off = False

    async def start(self) -> str:
        self.desk, self.worker = (
            FakeDesk({"m": [*FakeDesk().models["m"]], "other": [*FakeDesk().models["m"]]}),
            FakeWorker(),
        )
        self.worker.answer = echo
        self.store = SessionStore.open(self.folder / "c.sqlite", Bounds(64 * 1024**2, 1e9))
        behind = web.AppRunner(self.worker.app())
        port = await self._site(behind)
        self.desk.endpoint = Endpoint(host="127.0.0.1", port=port)
        saved, self.snapshots, _ = saved_in(self.folder / "snapshots", "m")
        self.desk.snapshots = None if self.off else saved
        sessions = None if self.off else self.store
        return f"http://127.0.0.1:{await self._site(make_runner(make_app(self.desk, Server(), '1', sessions), 0))}"

    async def _site(self, runner: web.AppRunner) -> int:
        self.runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return int(runner.addresses[0][1])

    async def stop(self) -> None:
        for runner in reversed(self.runners):
            await runner.cleanup()
        self.store.close()


@pytest.fixture
def gateway(
    _loop: asyncio.AbstractEventLoop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Gateway]:
    """A gateway that ``$PAGEIN_URL`` names; its parameter switches the store off."""
    served = Gateway(tmp_path)
    served.off = getattr(request, "param", None) == "off"
    monkeypatch.setenv("PAGEIN_URL", asyncio.run_coroutine_threadsafe(served.start(), _loop).result())
    yield served
    asyncio.run_coroutine_threadsafe(served.stop(), _loop).result()
