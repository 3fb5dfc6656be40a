"""Starts real workers whose engine is the fake one, and talks to them."""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pagein.protocol import WorkerSpec
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.log import ModelLog

FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"
LEFT_OUT = re.compile(r"not \w+( and not \w+)*")
MARKED = re.compile(r"^pytestmark = \[?pytest\.mark\.(\w+)", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module whose tests ``-m`` leaves out one and all: torch and thousands of asserts that nothing runs."""
    marks = str(config.getoption("markexpr"))
    if collection_path.suffix != ".py" or not LEFT_OUT.fullmatch(marks):
        return None
    marked = MARKED.search(collection_path.read_text())
    return True if marked and f"not {marked[1]}" in marks.split(" and ") else None


@pytest.fixture
def model_log(tmp_path: Path) -> ModelLog:
    """A log in an empty folder."""
    return ModelLog(tmp_path / "logs" / "fake.log", max_bytes=1024 * 1024, files=2)


@pytest.fixture
def short_folder() -> Iterator[str]:
    """A folder whose path leaves room for a Unix socket's name."""
    with tempfile.TemporaryDirectory(prefix="pi-") as folder:
        yield folder


@pytest.fixture
def fake_spec(tmp_path: Path) -> Callable[..., WorkerSpec]:
    """Make the spec of a fake engine with the given switches."""

    def make(*switches: str, **fields: Any) -> WorkerSpec:
        command = [sys.executable, str(FAKE_ENGINE), "--socket", "${socket}", *switches]
        given = {"name": "fake", "engine": "command", "token": "secret", "socket_dir": str(tmp_path / "run")}
        return WorkerSpec(**(given | {"command": command, "ready_timeout": 30.0} | fields))

    return make


@pytest.fixture
async def start_worker(
    fake_spec: Callable[..., WorkerSpec], model_log: ModelLog
) -> AsyncIterator[Callable[..., Awaitable[Child]]]:
    """Start a worker on a fake engine; whatever the test leaves is killed."""
    children: list[Child] = []

    async def make(*switches: str, on_spawn: Callable[[int], None] | None = None, **fields: Any) -> Child:
        spec = fake_spec(*switches, **fields)
        child = await Child.start(spec, environ=worker_environment(spec, {}), log=model_log, on_spawn=on_spawn)
        children.append(child)
        return child

    yield make
    for child in children:
        await child.kill()
