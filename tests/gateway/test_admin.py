"""The operator's endpoints show what the desk says and do what they are asked."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from pagein.errors import LoadFailed
from pagein.gateway.ports import Decision
from pagein.protocol import Capability
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, eventually

SOON = 0.001


async def test_models_are_listed_as_openai_does(desk: FakeDesk, serve: Serve) -> None:
    """`/v1/models` lists the configured models in their order, with OpenAI's fields and what they can do."""
    desk.models = {"b": [Capability.CHAT], "a": [Capability.EMBEDDING]}
    gateway = await serve()
    async with gateway.get("/v1/models") as response:
        body = await response.json()
    assert body["object"] == "list"
    assert [model["id"] for model in body["data"]] == ["b", "a"]
    assert {"object": "model", "owned_by": "pagein", "capabilities": ["chat"]}.items() <= body["data"][0].items()
    async with gateway.get("/v1/models/a") as response:
        assert await response.json() == body["data"][1]


async def test_status_is_the_whole_view(desk: FakeDesk, serve: Serve) -> None:
    """Every field of the view is there; unknown is null, not zero."""
    gateway = await serve()
    async with gateway.get("/api/status") as response:
        body = await response.json()
    assert body == asdict(desk.status())
    assert body["models"][0]["peak"] is None


async def test_a_plan_is_a_question(desk: FakeDesk, serve: Serve) -> None:
    """`/api/plan` shows the dry run; it needs a model that exists."""
    gateway = await serve()
    async with gateway.get("/api/plan?model=m") as response:
        assert await response.json() == asdict(desk.plan("m"))
    async with gateway.get("/api/plan") as response:
        assert response.status == 400
    async with gateway.get("/api/plan?model=x") as response:
        assert response.status == 404


@pytest.mark.parametrize("verb", ["load", "unload", "pin", "unpin"])
async def test_acts_reach_the_desk_and_show_the_model(desk: FakeDesk, serve: Serve, verb: str) -> None:
    """Each act is one POST that answers with the model as it is afterwards; GET does nothing."""
    gateway = await serve()
    async with gateway.post(f"/api/models/m/{verb}") as response:
        assert (response.status, (await response.json())["name"]) == (200, "m")
    assert desk.acts == [(verb, "m")]
    async with gateway.get(f"/api/models/m/{verb}") as response:
        assert response.status == 405
    async with gateway.post(f"/api/models/x/{verb}") as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
    assert desk.acts == [(verb, "m")]


async def test_an_allowance_is_a_size(desk: FakeDesk, serve: Serve) -> None:
    """Text with a unit, or bytes; anything else is refused before the desk is asked."""
    gateway = await serve()
    for size in ("2KiB", 2048):
        async with gateway.post("/api/models/m/allowance", json={"memory": size}) as response:
            body = await response.json()
        assert (response.status, body["name"], body["plan"]) == (200, "m", ["3 of 6 blocks resident"])
    assert desk.acts == [("allow 2048", "m")] * 2
    for size in (None, "much", 0, -1, True, 1.5, [1]):
        async with gateway.post("/api/models/m/allowance", json={"memory": size}) as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "memory")
    async with gateway.post("/api/models/x/allowance", json={"memory": 1}) as response:
        assert response.status == 404
    assert len(desk.acts) == 2


async def test_an_allowance_may_name_its_pool(desk: FakeDesk, serve: Serve) -> None:
    """It is passed on; what is no name is refused."""
    gateway = await serve()
    async with gateway.post("/api/models/m/allowance", json={"memory": 2048, "pool": "cuda:0"}) as response:
        assert response.status == 200
    assert desk.acts == [("allow 2048 of cuda:0", "m")]
    async with gateway.post("/api/models/m/allowance", json={"memory": 2048, "pool": 0}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "pool")


async def test_a_load_that_fails_says_why(desk: FakeDesk, serve: Serve) -> None:
    """The error of a load is the error of its request."""
    desk.refusal = LoadFailed("worker ended with exit code 1: no such file")
    gateway = await serve()
    async with gateway.post("/api/models/m/load") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["message"]) == (503, "load_failed", desk.refusal.message)


async def test_decisions_are_filtered_and_limited(desk: FakeDesk, serve: Serve) -> None:
    """The last decisions, oldest first, of one model or of all."""
    desk.models["n"] = [Capability.CHAT]
    for model in ("m", "n", "m", None, "m"):
        desk.decide("note", model)
    gateway = await serve()
    for query, expected in [("", [1, 2, 3, 4, 5]), ("?model=m&limit=2", [3, 5]), ("?limit=1", [5]), ("?model=n", [2])]:
        async with gateway.get(f"/api/decisions{query}") as response:
            assert [d["seq"] for d in (await response.json())["decisions"]] == expected
    async with gateway.get("/api/decisions?model=x") as response:
        assert response.status == 404


@pytest.mark.parametrize("limit", ["0", "-1", "x", "", "1e3", "99999999999999999999", "²"])
async def test_odd_limits_are_named(serve: Serve, limit: str) -> None:
    """A limit that is no sensible number gives 400."""
    gateway = await serve()
    async with gateway.get("/api/decisions", params={"limit": limit}) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, "limit")


def write(path: str, content: bytes) -> None:
    """Write a file."""
    Path(path).write_bytes(content)


async def read_event(response: Any) -> dict[str, Any]:
    """Read the next event, past heartbeats."""
    async with asyncio.timeout(10):
        while True:
            lines = (await response.content.readuntil(b"\n\n")).decode().strip().split("\n")
            if not lines[0].startswith(":"):
                break
    number, data = lines
    value = json.loads(data.removeprefix("data: "))
    assert isinstance(value, dict)
    assert number == f"id: {value['seq']}"
    return value


async def test_events_follow_the_decisions(desk: FakeDesk, serve: Serve) -> None:
    """Each decision from now on is one event with its reason; the stream ends with the daemon."""
    desk.decide("note", "m")
    gateway = await serve()
    async with gateway.get("/api/events") as response:
        assert response.headers["Content-Type"] == "text/event-stream"
        assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        for kind in ("load", "ready"):
            decision = desk.decide(kind, "m", bytes=5)
            assert await read_event(response) == asdict(decision)
        for queue in desk.streams:
            queue.put_nowait(None)
        assert await response.read() == b""


async def test_events_of_one_model(desk: FakeDesk, serve: Serve) -> None:
    """A filter keeps other models out."""
    gateway = await serve()
    async with gateway.get("/api/events?model=m") as response:
        await response.content.readuntil(b"\n\n")
        desk.decide("load", "n")
        desk.decide("load", "m")
        assert (await read_event(response))["seq"] == 2
    async with gateway.get("/api/events?model=x") as response:
        assert response.status == 404


async def test_events_continue_after_a_break(desk: FakeDesk, serve: Serve) -> None:
    """With Last-Event-ID the missed decisions come first, each once, then the new ones."""
    for _ in range(5):
        desk.decide("note", "m")
    gateway = await serve()
    async with gateway.get("/api/events", headers={"Last-Event-ID": "3"}) as response:
        seen = [(await read_event(response))["seq"] for _ in range(2)]
        desk.decide("note", "m")
        seen.append((await read_event(response))["seq"])
    assert seen == [4, 5, 6]


@pytest.mark.parametrize("known_already", [True, False])
async def test_no_decision_is_lost_or_doubled_at_the_seam(
    desk: FakeDesk, serve: Serve, monkeypatch: pytest.MonkeyPatch, known_already: bool
) -> None:
    """A decision in the moment between the past and the present comes once, whichever of them it falls into."""
    read = desk.decisions
    desk.decide("note", "m")

    def decisions(model: str | None = None, limit: int = 100) -> list[Decision]:
        past = read(model, limit)
        desk.decide("load", "m")
        return read(model, limit) if known_already else past

    monkeypatch.setattr(desk, "decisions", decisions)
    gateway = await serve()
    async with gateway.get("/api/events", headers={"Last-Event-ID": "0"}) as response:
        seen = [(await read_event(response))["seq"] for _ in range(2)]
        desk.decide("ready", "m")
        seen.append((await read_event(response))["seq"])
    assert seen == [1, 2, 3]


async def test_quiet_events_have_heartbeats(desk: FakeDesk, serve: Serve) -> None:
    """A stream without decisions shows that it lives; a client that leaves ends its subscription."""
    gateway = await serve(heartbeat=SOON)
    async with gateway.get("/api/events") as response:
        before = len(desk.streams)
        for _ in range(3):
            assert await response.content.readuntil(b"\n\n") == b": listening\n\n"
        decision = desk.decide("load", "m")
        assert (await read_event(response))["seq"] == decision.seq
        response.close()
    await eventually(lambda: len(desk.streams) < before)


async def test_a_log_is_shown_from_its_end(desk: FakeDesk, serve: Serve, tmp_path: Path) -> None:
    """The last lines, as they are; a log that does not exist yet is empty."""
    desk.log = str(tmp_path / "m.log")
    gateway = await serve()
    async with gateway.get("/api/models/m/log") as response:
        assert (response.status, await response.read()) == (200, b"")
    lines = [f"line {i} \xff\n".encode("latin-1") for i in range(5000)]
    write(desk.log, b"".join(lines))
    async with gateway.get("/api/models/m/log?lines=3") as response:
        assert await response.read() == b"".join(lines[-3:])
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
    async with gateway.get("/api/models/m/log") as response:
        assert await response.read() == b"".join(lines[-100:])
    async with gateway.get("/api/models/x/log") as response:
        assert response.status == 404


async def test_a_huge_log_is_read_from_near_its_end(desk: FakeDesk, serve: Serve, tmp_path: Path) -> None:
    """The answer is bounded, whatever the lines are."""
    desk.log = str(tmp_path / "m.log")
    write(desk.log, b"x" * 6_000_000)
    gateway = await serve()
    async with gateway.get("/api/models/m/log?lines=10000") as response:
        assert len(await response.read()) == 4 * 1024 * 1024


async def test_the_server_says_what_it_is(serve: Serve) -> None:
    """Answers name Pagein and its version, not the library below."""
    gateway = await serve()
    async with gateway.get("/health") as response:
        assert response.headers["Server"] == "pagein/1.2"
