"""A gateway that is killed under load has kept every turn whose answer a client had in full."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path

import aiohttp
import pytest

from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from pagein.sessions.tenant import tenant_of

pytestmark = pytest.mark.scenarios

ROUNDS = 8
CLIENTS = 4
SERVER = """
import asyncio, sys
from pathlib import Path
from aiohttp import web
from pagein.config.schema import Server
from pagein.gateway.app import make_app, make_runner
from pagein.protocol import Endpoint
from pagein.sessions.retention import Bounds
from pagein.sessions.store import SessionStore
from tests.gateway.fakes import FakeDesk, FakeWorker
from tests.gateway.talkers import echo

async def listen(runner):
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner.addresses[0][1]

async def main():
    desk, worker = FakeDesk(), FakeWorker(answer=echo)
    desk.endpoint = Endpoint(host="127.0.0.1", port=await listen(web.AppRunner(worker.app())))
    store = SessionStore.open(Path(sys.argv[1]), Bounds(10**9, 1e9))
    print(await listen(make_runner(make_app(desk, Server(), "1", store))), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_no_answered_turn_is_lost(tmp_path: Path, request) -> None:
    """8 kills while 4 clients talk, half of them streamed: what was answered is there, whole, once and in order."""
    path, chance = tmp_path / "c.sqlite", random.Random(11)
    answered: dict[str, list[str]] = {f"s{index}": [] for index in range(CLIENTS)}
    for number in range(ROUNDS):
        await _talk_and_kill(path, request.config.rootpath, answered, number, chance.randrange(1, 30))
    assert sum(map(len, answered.values())) >= ROUNDS
    store = SessionStore.open(path, Bounds(10**9, 1e9))
    for name, questions in answered.items():
        past = await store.past_of_session(tenant_of(None, None), name, 10**9)
        said = [entry.body["content"] for entry in past.entries] if past is not None else []
        asked = said[::2]
        assert said[1::2] == [f"{2 * index + 1}:{text}" for index, text in enumerate(asked)]
        assert len(set(asked)) == len(asked)
        assert [text for text in asked if text in questions] == questions
    store.close()


async def _talk_and_kill(path: Path, root: Path, answered: dict[str, list[str]], number: int, count: int) -> None:
    """Start a gateway, let clients talk, and kill it after so many answers; what was answered is added."""
    command = (sys.executable, "-c", SERVER, str(path))
    server = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(root)}
    )
    assert server.stdout is not None
    port = int(await server.stdout.readline())
    left = [count]

    async def talk(session: aiohttp.ClientSession, name: str) -> None:
        for turn in range(1000):
            text = f"{name}-{number}-{turn}"
            body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": turn % 2 == 0}
            url, headers = f"http://127.0.0.1:{port}/v1/chat/completions", {"X-Pagein-Session": name}
            try:
                async with session.post(url, json=body, headers=headers) as response:
                    whole = await response.read()
            except (aiohttp.ClientError, ConnectionError):
                return
            if turn % 2 == 0 and not whole.rstrip().endswith(b"[DONE]"):
                return
            if turn % 2:
                json.loads(whole)
            answered[name].append(text)
            left[0] -= 1
            if left[0] == 0:
                server.send_signal(signal.SIGKILL)

    async with aiohttp.ClientSession() as session:
        await asyncio.gather(*(talk(session, name) for name in answered))
    assert await server.wait() == -signal.SIGKILL
