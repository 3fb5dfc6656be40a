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
from pagein.errors import DoesNotFit, InUse, WorkerDied
from pagein.protocol import ALLOWANCE_PATH, Endpoint
from pagein.scheduler.actions import Resize

MIB = 1024**2
MARGIN = 64 * MIB
"""What a limit has beyond the allowance, at the least."""
Answer = tuple[int, dict[str, Any]]


class Scene:
    """A worker that had 100 MiB, its cgroup and the meter: everything writes down when it was asked, in MiB."""

    def __init__(self, endpoint: Endpoint, steps: list[str]) -> None:
        self.steps = steps
        cell = SimpleNamespace(set_limit=lambda limit: steps.append(f"limit {(limit - MARGIN) // MIB}"))
        ready = SimpleNamespace(endpoint=endpoint)
        child = SimpleNamespace(ready=ready, note_allowance=lambda now: steps.append(f"recorded {_mib(now)}"))
        self.worker = Worker({"ram": 100 * MIB}, child=child, cell=cell)  # type: ignore[arg-type]
        self.meter = SimpleNamespace(measure_load=self._measure)

    async def _measure(self, name: str) -> dict[str, int]:
        self.steps.append("measured")
        return {}

    async def resize(self, count: int, pool: str = "ram") -> Any:
        action = Resize("m", {**self.worker.allowance, pool: count * MIB}, "test", pool)
        self.said = await resize(action, self.worker, MARGIN, self.meter, 5.0)  # type: ignore[arg-type]
        assert (self.said.model, self.said.allowance) == ("m", action.allowance)
        return self.said.error

    @property
    def allowance(self) -> dict[str, int]:
        """What the worker has, in MiB."""
        return _mib(self.worker.allowance)


def _mib(sizes: dict[str, int]) -> dict[str, int]:
    return {pool: size // MIB for pool, size in sizes.items()}


@pytest.fixture
async def scene() -> AsyncIterator[Callable[..., Awaitable[Scene]]]:
    """Make a scene whose worker answers so."""
    runners: list[web.AppRunner] = []
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:

        async def make(status: int = 200, body: dict[str, Any] | None = None) -> Scene:
            steps: list[str] = []

            async def answer(request: web.Request) -> web.Response:
                told = await request.json()
                steps.append(f"told {told['bytes'] // MIB} of {told['pool']}")
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
    assert s.steps[:2] == ["limit 150", "told 150 of ram"]
    assert s.allowance == {"ram": 150}


async def test_the_limit_falls_after_the_worker_gave_back(scene):
    """It is measured once it has, and before anybody believes it."""
    s = await scene()
    assert await s.resize(50) is None
    assert s.steps == ["limit 100", "told 50 of ram", "recorded {'ram': 50}", "measured", "limit 50"]
    assert s.allowance == {"ram": 50}


@pytest.mark.parametrize("count", [50, 150])
async def test_a_refusal_leaves_everything_as_it_was(scene, count):
    """The worker's numbers are passed on."""
    error = {"code": "plan_too_large", "need_bytes": 80, "memory_bytes": count, "parts": {"a": 80}, "hint": "h"}
    s = await scene(507, {"error": error})
    refused = await s.resize(count)
    assert isinstance(refused, DoesNotFit)
    assert (refused.details["need_bytes"], refused.details["memory_bytes"], refused.hint) == (80, count, "h")
    assert s.steps[-1] == "limit 100"
    assert s.allowance == {"ram": 100}


async def test_calls_that_do_not_end_are_no_failure_of_the_worker(scene):
    """Parts of a split model that are in use leave later: whoever asked can ask again, and is told so."""
    error = {"code": "in_use", "message": "calls did not end with backbone", "need_bytes": 80, "allowance_bytes": 50}
    s = await scene(409, {"error": error})
    refused = await s.resize(50)
    assert isinstance(refused, InUse)
    assert (refused.message, refused.details["need_bytes"]) == (error["message"], 80)
    assert s.allowance == {"ram": 100}


async def test_bytes_of_a_gpu_leave_the_limit_of_ram_alone(scene):
    """A cgroup knows nothing of them; the worker is told which memory is meant."""
    s = await scene()
    s.worker.allowance = {"ram": 100 * MIB, "cuda:0": 900 * MIB}
    assert await s.resize(700, "cuda:0") is None
    assert s.steps[:2] == ["limit 100", "told 700 of cuda:0"]
    assert s.steps[-1] == "limit 100"
    assert s.allowance == {"ram": 100, "cuda:0": 700}


async def test_the_new_plan_is_passed_on_in_the_workers_words(scene):
    """Whoever asked sees it; an answer that is none is no plan."""
    s = await scene(200, {"plan": ["3 of 6 blocks resident", "memory 50 MiB", 7]})
    await s.resize(50)
    assert s.said.plan == ("3 of 6 blocks resident", "memory 50 MiB")
    odd = await scene(200, {"plan": 3})
    assert await odd.resize(50) is None
    assert odd.said.plan == ()


async def test_any_other_answer_is_a_refusal_too(scene):
    """An engine without the path, a broken answer, nobody there."""
    assert "keeps its allowance: boom" in (await (await scene(500, {"error": {"message": "boom"}})).resize(50)).message
    alone = Scene(Endpoint(socket="/no/such.sock"), [])
    assert "could not be told" in (await alone.resize(50)).message
    assert alone.allowance == {"ram": 100}


async def test_a_worker_that_leaves_is_not_asked(scene):
    """Its end says the rest."""
    s = await scene()
    s.worker.told = WorkerDied("evicted")
    assert (await s.resize(50)).code == "in_use"
    assert s.steps == []
