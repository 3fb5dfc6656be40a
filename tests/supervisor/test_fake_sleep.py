"""The fake engine sleeps in the way that it is told: tests rely on it."""

from __future__ import annotations

import aiohttp
import pytest
from tests.workers import ask

from pagein.memory.probes.process import read_tree
from pagein.protocol import SLEEP_PATH, WAKE_PATH, Endpoint

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
MIB = 1024**2


async def status_of(endpoint: Endpoint, path: str, body: object) -> int:
    """POST and return only the status."""
    async with (
        aiohttp.ClientSession(connector=aiohttp.UnixConnector(endpoint.socket or "")) as session,
        session.post(f"http://engine{path}", json=body) as answer,
    ):
        return answer.status


@pytest.mark.parametrize(("switch", "kept"), [("--sleeps", 0), ("--sleep-lies", 36)])
async def test_it_gives_memory_back_or_says_so_only(start_worker, switch, kept):
    """Both answer 200 and refuse requests while asleep; the liar keeps nine tenths of its 40 MiB. Awake all is back."""
    child = await start_worker("--allocate", "40MiB", switch)
    endpoint, awake = child.ready.endpoint, read_tree(child.pid).ram
    assert await status_of(endpoint, SLEEP_PATH, {}) == 200
    assert awake - read_tree(child.pid).ram == pytest.approx((40 - kept) * MIB, abs=2 * MIB)
    assert (await ask(endpoint, "/control/state"))["asleep"]
    assert await status_of(endpoint, CHAT, HELLO) == 503
    assert await status_of(endpoint, WAKE_PATH, {}) == 200
    assert read_tree(child.pid).ram == pytest.approx(awake, abs=2 * MIB)
    assert await status_of(endpoint, CHAT, HELLO) == 200


async def test_it_refuses_to_sleep(start_worker):
    """500, and it stays awake."""
    endpoint = (await start_worker("--sleep-fails")).ready.endpoint
    assert await status_of(endpoint, SLEEP_PATH, {}) == 500
    assert await status_of(endpoint, CHAT, HELLO) == 200


async def test_without_the_switch_it_has_no_such_path(start_worker):
    """As most servers."""
    endpoint = (await start_worker()).ready.endpoint
    assert await status_of(endpoint, SLEEP_PATH, {}) == 404
