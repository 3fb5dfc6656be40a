"""Sleep over HTTP: the two paths of vLLM, what waits, what is refused, and what happens when it does not work."""

from __future__ import annotations

import asyncio

import pytest

from pagein.engines.local.serve import LocalServer
from pagein.errors import InferenceFailed, LoadFailed
from pagein.protocol import SLEEP_PATH, WAKE_PATH, WorkerSpec
from tests.engines.local.conftest import request
from tests.engines.local.test_serve import EMBEDDINGS, Gate, until_entered
from tests.engines.local.tiny import TinyEmbedder


class Sleeper:
    """Writes down what it was told, and refuses where a test wants it to."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.refusal: Exception | None = None

    def sleep(self) -> None:
        self._do("sleep")

    def wake(self) -> None:
        self._do("wake")

    def _do(self, what: str) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.told.append(what)


@pytest.fixture
def sleeper() -> Sleeper:
    """What the engine would give its server."""
    return Sleeper()


@pytest.fixture
def start_sleeper(socket_dir, sleeper):
    """Start a server that can sleep; stopped after the test."""
    servers = []

    def act(model=None):
        spec = WorkerSpec(name="tiny", engine="test", token="t", socket_dir=str(socket_dir), parallel=4)
        servers.append(LocalServer(spec, model or TinyEmbedder(), sleeper))
        return servers[-1].start()

    yield act
    for server in servers:
        server.stop()


async def is_sleeping(endpoint) -> bool:
    return (await request(endpoint, "GET", "/is_sleeping")).body["is_sleeping"]


async def test_a_model_sleeps_and_wakes(start_sleeper, sleeper, capfd):
    """Asleep it answers 503 and keeps its health; awake it answers as before; the log tells both."""
    endpoint = start_sleeper()
    assert (await request(endpoint, "POST", SLEEP_PATH)).status == 200
    assert await is_sleeping(endpoint)
    refused = await request(endpoint, "POST", EMBEDDINGS, json={"input": "a"})
    assert (refused.status, refused.error["code"]) == (503, "load_failed")
    assert "asleep" in refused.error["message"]
    assert (await request(endpoint, "GET", "/health")).status == 200
    assert (await request(endpoint, "POST", WAKE_PATH)).status == 200
    assert not await is_sleeping(endpoint)
    assert (await request(endpoint, "POST", EMBEDDINGS, json={"input": "a"})).status == 200
    assert sleeper.told == ["sleep", "wake"]
    printed = capfd.readouterr().out
    assert printed.index("fell asleep in") < printed.index("woke up in")


async def test_twice_is_once(start_sleeper, sleeper):
    """Sleeping while asleep and waking while awake succeed and do nothing."""
    endpoint = start_sleeper()
    for path in (WAKE_PATH, SLEEP_PATH, SLEEP_PATH, WAKE_PATH, WAKE_PATH):
        assert (await request(endpoint, "POST", path)).status == 200
    assert sleeper.told == ["sleep", "wake"]


@pytest.mark.parametrize("level", ["1", "2"])
async def test_both_levels_of_vllm_are_taken(start_sleeper, sleeper, level):
    """They mean the same here."""
    assert (await request(start_sleeper(), "POST", SLEEP_PATH, params={"level": level})).status == 200
    assert sleeper.told == ["sleep"]


async def test_another_level_is_refused(start_sleeper, sleeper):
    """Levels are not made up."""
    reply = await request(start_sleeper(), "POST", SLEEP_PATH, params={"level": "3"})
    assert (reply.status, reply.error["code"]) == (400, "invalid_request")
    assert sleeper.told == []


async def test_what_was_asked_before_is_answered_first(start_sleeper, sleeper):
    """Sleep waits for the requests that were there, and a request that came after it meets a model that sleeps."""
    gate = Gate()
    endpoint = start_sleeper(gate)
    before = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "before"}))
    await until_entered(gate)
    sleeping = asyncio.create_task(request(endpoint, "POST", SLEEP_PATH))
    # health is answered by the same loop after the sleep was asked for
    await request(endpoint, "GET", "/health")
    assert sleeper.told == []
    after = asyncio.create_task(request(endpoint, "POST", EMBEDDINGS, json={"input": "after"}))
    await request(endpoint, "GET", "/health")
    gate.sign.release()
    assert [reply.status for reply in await asyncio.gather(before, sleeping, after)] == [200, 200, 503]
    assert gate.seen == ["before"]


async def test_a_model_that_does_not_fall_asleep_stays_awake(start_sleeper, sleeper):
    """The answer says so, and requests are answered."""
    endpoint = start_sleeper()
    sleeper.refusal = InferenceFailed("tiny", "it did not fall asleep")
    reply = await request(endpoint, "POST", SLEEP_PATH)
    assert reply.status == 500
    assert "did not fall asleep" in reply.error["message"]
    assert not await is_sleeping(endpoint)
    assert (await request(endpoint, "POST", EMBEDDINGS, json={"input": "a"})).status == 200


async def test_a_model_that_does_not_wake_stays_asleep(start_sleeper, sleeper):
    """The reason is told, requests are refused, and waking can be tried again."""
    endpoint = start_sleeper()
    await request(endpoint, "POST", SLEEP_PATH)
    sleeper.refusal = LoadFailed("the file is gone")
    reply = await request(endpoint, "POST", WAKE_PATH)
    assert (reply.status, reply.error["message"]) == (503, "the file is gone")
    assert await is_sleeping(endpoint)
    assert (await request(endpoint, "POST", EMBEDDINGS, json={"input": "a"})).status == 503
    sleeper.refusal = None
    assert (await request(endpoint, "POST", WAKE_PATH)).status == 200
    assert (await request(endpoint, "POST", EMBEDDINGS, json={"input": "a"})).status == 200


@pytest.mark.parametrize("path", [SLEEP_PATH, WAKE_PATH])
async def test_a_server_whose_engine_cannot_sleep_has_no_such_path(start, path):
    """404, as of any path that is not there."""
    assert (await request(start(TinyEmbedder()), "POST", path)).status == 404
