"""What a request wishes of its model: how long it stays, how much context it has."""

from __future__ import annotations

import json
import math

import pytest

from pagein.protocol import PATHS, Capability
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker

CHAT = PATHS[Capability.CHAT]


SPELLINGS = [
    ("5m", 300.0), (90, 90.0), ("90", 90.0), (0, 0.0), (1.5, 1.5), (-1, math.inf), ("-1", math.inf), ("-1m", math.inf),
    (None, None),
]  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, PATHS[Capability.EMBEDDING], PATHS[Capability.RERANK], "/run/m"])
async def test_keep_alive_reaches_the_desk(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """Ollama's field, in all its spellings; null wishes nothing."""
    gateway = await serve()
    for number, (given, seconds) in enumerate(SPELLINGS, 1):
        async with gateway.post(path, json={"model": "m", "input": "x", "keep_alive": given}) as response:
            assert response.status == 200, given
        assert desk.keep_alives[number - 1 :] == [seconds], given


async def test_a_request_without_wishes_has_none(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Nothing is passed on that nobody asked for."""
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m"}) as response:
        assert response.status == 200
    assert desk.keep_alives == [None]


@pytest.mark.parametrize("path", [CHAT, "/run/m"])
@pytest.mark.parametrize("given", ["soon", -2, "-5m", True, [1], {}, "", 1e300, "9" * 5000, 10**400])
async def test_odd_times_are_named(desk: FakeDesk, serve: Serve, path: str, given: object) -> None:
    """A time that cannot be is refused by its name, shortly, and nobody waits for it."""
    gateway = await serve()
    async with gateway.post(path, json={"model": "m", "input": "x", "keep_alive": given}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "invalid_request", "keep_alive")
    assert "'5m'" in error["message"]
    assert len(error["message"]) < 200
    assert desk.asked.empty()


async def test_what_is_for_pagein_does_not_reach_the_worker(worker: FakeWorker, serve: Serve) -> None:
    """Strict engines refuse fields that they do not know; every other byte passes, options of theirs included."""
    gateway = await serve()
    body = b'{"model":"m",  "keep_alive":"5m","num_ctx":16, "options": {"num_ctx": 8, "seed": 1} }'
    async with gateway.post(CHAT, data=body) as response:
        assert response.status == 200
    assert worker.requests[0][1] == b'{"model":"m", "options": {"num_ctx": 8, "seed": 1} }'
    wishes = {"keep_alive": 0, "num_ctx": 16, "max_context_length": 16, "options": {"num_ctx": 8}}
    for path in ("/run/m", CHAT):
        async with gateway.post(path, json={"messages": [], "model": "m", **wishes}) as response:
            assert response.status == 200
        assert json.loads(worker.requests[-1][1]) == {"messages": [], "model": "m"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("wish", "field"),
    [
        ({"num_ctx": 4097}, "num_ctx"),
        ({"max_context_length": 4097}, "max_context_length"),
        ({"options": {"num_ctx": 4097}}, "options.num_ctx"),
        ({"options": {"num_ctx": 4097}, "num_ctx": 16}, "options.num_ctx"),
    ],
)
async def test_more_context_than_there_is_is_refused(
    desk: FakeDesk, serve: Serve, wish: dict[str, object], field: str, stream: bool
) -> None:
    """Both numbers are told, and nothing is loaded or reloaded for it."""
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m", "stream": stream, **wish}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    assert (error["tokens"], error["context"]) == (4097, 4096)
    assert f"a context of 4097 tokens (`{field}`), the context of 'm' holds 4096" in error["message"]
    assert desk.asked.empty()


async def test_a_context_known_only_when_loaded_is_checked_then(
    desk: FakeDesk, worker: FakeWorker, serve: Serve
) -> None:
    """Where the configuration leaves it to the engine, the loaded one counts, and the lease comes back."""
    desk.view_facts = {"context": None}
    desk.lease_facts = {"context": 2048}
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m", "num_ctx": 4096}) as response:
        assert (await response.json())["error"]["context"] == 2048
    assert await desk.settled() == [400]
    assert worker.requests == []


@pytest.mark.parametrize("known", [4096, None])
@pytest.mark.parametrize("wish", [{"num_ctx": 4096}, {"num_ctx": 16}, {"options": {"num_ctx": 5}}, {"options": [1]}])
async def test_a_wish_that_fits_is_served(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, wish: dict[str, object], known: int | None
) -> None:
    """Less than there is, or an unknown context: the model is used as it stands."""
    desk.view_facts = {"context": known}
    desk.lease_facts = {"context": known}
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m", **wish}) as response:
        assert response.status == 200


@pytest.mark.parametrize("given", [0, -1, True, "4096", 1.5, [1]])
async def test_odd_contexts_are_named(desk: FakeDesk, serve: Serve, given: object) -> None:
    """A wish that is no number of tokens is refused by its name."""
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m", "options": {"num_ctx": given}}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "options.num_ctx")
    assert desk.asked.empty()


async def test_a_wish_for_a_model_that_is_not_there(serve: Serve) -> None:
    """The name is the fault, not the wish."""
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "x", "num_ctx": 99999}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
