"""A daemon that can be killed: a small program that starts one worker as the daemon does."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagein.protocol import Endpoint, WorkerSpec, encode
from pagein.supervisor.registry import Record, Registry, read_record
from pagein.supervisor.sweep import sweep

PROGRAM = """
import asyncio, json, sys
from dataclasses import asdict
from pathlib import Path
from pagein.protocol import decode
from pagein.supervisor.child import Child
from pagein.supervisor.environment import worker_environment
from pagein.supervisor.log import ModelLog
from pagein.supervisor.registry import Registry
from pagein.supervisor.spare import Spare

async def main():
    state, adopt_wait, moment = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    spec = decode(sys.stdin.buffer.readline())
    registry = Registry.open(state, adopt_wait)
    log = ModelLog(state / "fake.log", 100_000, 1)
    environ = worker_environment(spec, {})
    spare = Spare(environ, registry)
    if moment == "spare":
        spare.refill()
        while spare.pid is None:
            await asyncio.sleep(0)
        told = {"pids": [spare.pid]}
    else:
        child = await Child.start(spec, environ=environ, log=log, registry=registry, identity="weights")
        told = {"pids": await child.pids(), "endpoint": asdict(child.ready.endpoint)}
    registry._writer.submit(lambda: None).result()  # what was asked is on disk
    print(json.dumps(told), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass(slots=True)
class Daemon:
    """It runs until a test kills it."""

    process: subprocess.Popen[bytes]
    state: Path
    tree: list[psutil.Process]
    endpoint: Endpoint | None

    def kill(self) -> None:
        """SIGKILL, and collect it."""
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()

    def records(self) -> list[Record]:
        """What the registry has of children."""
        records = [read_record(path) for path in sorted((self.state / "children").glob("*-*.json"))]
        return [record for record in records if record is not None]


@pytest.fixture
async def daemon(
    fake_spec: Callable[..., WorkerSpec], tmp_path: Path, short_folder: str
) -> AsyncIterator[Callable[..., Awaitable[Daemon]]]:
    """Start daemons that share a state folder; they and all that they leave are ended."""
    started: list[Daemon] = []

    async def make(*switches: str, adopt_wait: float = 0.0, moment: str = "ready", **fields: Any) -> Daemon:
        state = tmp_path / "state"
        arguments = [sys.executable, "-c", PROGRAM, str(state), str(adopt_wait), moment]
        process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        started.append(Daemon(process, state, [], None))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(encode(fake_spec(*switches, socket_dir=short_folder, **fields)))
        process.stdin.flush()
        told = json.loads(await asyncio.to_thread(process.stdout.readline))
        started[-1].tree = [psutil.Process(pid) for pid in told["pids"]]
        started[-1].endpoint = Endpoint(**told["endpoint"]) if "endpoint" in told else None
        return started[-1]

    yield make
    for one in started:
        if one.process.poll() is None:
            one.kill()
    if started:
        registry = Registry.open(started[0].state)
        await sweep(registry)
        registry.close()


@pytest.fixture
def registry(tmp_path: Path) -> Any:
    """The registry of the next daemon on the same state folder, in this process; closed at the end."""
    made: list[Registry] = []

    def make(adopt_wait: float = 0.0) -> Registry:
        made.append(Registry.open(tmp_path / "state", adopt_wait))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """Give other tasks the loop until something holds, within a bound."""

    async def wait(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not condition():
                await asyncio.sleep(0.01)

    return wait
