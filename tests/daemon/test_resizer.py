"""Telling a worker its new allowance: what happens to the cgroup's limit, and when."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from pagein.daemon.resizer import resize
from pagein.daemon.worker import Worker
from pagein.errors import DoesNotFit, WorkerDied
from pagein.protocol import ALLOWANCE_PATH, Endpoint
from pagein.scheduler.actions import Resize

Answer = tuple[int, dict[str, Any]]


class Scene:
    """A worker that had 100 bytes, its cgroup and the meter: everything writes down when it was asked."""

    def __init__(self, endpoint: Endpoint, steps: list[str]) -> None:
        self.steps = steps
        cell = SimpleNamespace(set_limit=lambda limit: steps.append(f"limit {limit}"))
        child = SimpleNamespace(ready=SimpleNamespace(endpoint=endpoint))
        self.worker = Worker({"ram": 100}, child=child, cell=cell)  # type: ignore[arg-type]
        self.meter = SimpleNamespace(measure_load=self._measure)

    async def _measure(self, name: str) -> dict[str, int]:
        self.steps.append("measured")
        return {}

    async def resize(self, count: int) -> Any:
        action = Resize("m", {"ram": count}, "test")
        return await resize(action, self.worker, lambda worker: worker.allowance["ram"], self.meter, 5.0)  # type: ignore[arg-type]


@pytest.fixture
async def scene() -> AsyncIterator[Callable[..., Awaitable[Scene]]]:
    """Make a scene whose worker answers so."""
    runners: list[web.AppRunner] = []
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:

        async def make(status: int = 200, body: dict[str, Any] | None = None) -> Scene:
            steps: list[str] = []

            async def answer(request: web.Request) -> web.Response:
                steps.append(f"told {(await request.json())['bytes']}")
                return web.json_response(body or {}, status=status)

            app = web.Application()
            app.router.add_post(ALLOWANCE_PATH, answer)
            runners.append(web.AppRunner(app))
            await runners[-1].setup()
            socket = str(Path(folder) / f"{len(runners)}.sock")
            await web.UnixSite(runners[-1], socket).start()
            return Scene(Endpoint(socket=socket), steps)

        yield make
        for runner in runners:
            await runner.cleanup()


async def test_the_limit_rises_before_the_worker_takes_anything(scene):
    """Else the kernel would end it for doing what it was told."""
    s = await scene()
    assert await s.resize(150) is None
    assert s.steps[:2] == ["limit 150", "told 150"]
    assert s.worker.allowance == {"ram": 150}


async def test_the_limit_falls_after_the_worker_gave_back(scene):
    """It is measured once it has, and before anybody believes it."""
    s = await scene()
    assert await s.resize(50) is None
    assert s.steps == ["limit 100", "told 50", "measured", "limit 50"]
    assert s.worker.allowance == {"ram": 50}


@pytest.mark.parametrize("count", [50, 150])
async def test_a_refusal_leaves_everything_as_it_was(scene, count):
    """The worker's numbers are passed on."""
    error = {"code": "plan_too_large", "need_bytes": 80, "memory_bytes": count, "parts": {"a": 80}, "hint": "h"}
    s = await scene(507, {"error": error})
    refused = await s.resize(count)
    assert isinstance(refused, DoesNotFit)
    assert (refused.details["need_bytes"], refused.details["memory_bytes"], refused.hint) == (80, count, "h")
    assert s.steps[-1] == "limit 100"
    assert s.worker.allowance == {"ram": 100}


async def test_any_other_answer_is_a_refusal_too(scene):
    """An engine without the path, a broken answer, nobody there."""
    assert "keeps its allowance: boom" in (await (await scene(500, {"error": {"message": "boom"}})).resize(50)).message
    alone = Scene(Endpoint(socket="/no/such.sock"), [])
    assert "could not be told" in (await alone.resize(50)).message
    assert alone.worker.allowance == {"ram": 100}


async def test_a_worker_that_leaves_is_not_asked(scene):
    """Its end says the rest."""
    s = await scene()
    s.worker.told = WorkerDied("evicted")
    assert (await s.resize(50)).code == "in_use"
    assert s.steps == []
