"""Parts for operators over HTTP: what is shown, what is passed on, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from pagein.errors import NotLoaded, PartRefused
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import FakeDesk
from tests.gateway.splits import TASKS, part_view, parts_view

BASE = "/api/models/assistant"


@pytest.fixture(autouse=True)
def split(desk: FakeDesk) -> None:
    """There is a split model ``assistant``."""
    desk.models["assistant"] = []
    desk.split.models["assistant"] = TASKS


async def json_of(gateway: Served, path: str) -> Any:
    async with gateway.get(path) as response:
        assert response.status == 200
        return await response.json()


async def test_health_lazy_shows_every_part(desk: FakeDesk, serve: Serve) -> None:
    """State, bytes, leases, last use, last error and digest of each, and whether parts push each other out."""
    part = part_view("tag", leases=1, idle_seconds=None, last_error="tag-0.safetensors: its digest differs")
    desk.split.shown = parts_view(part, part_view("backbone", role="backbone"))
    gateway = await serve()
    told = await json_of(gateway, "/health/lazy")
    model = told["models"]["assistant"]
    assert (told["status"], model["state"], model["parts"]["owned"]) == ("ok", "resident", 200)
    assert model["parts"]["thrash"]["thrashing"] is False
    shown = model["parts"]["parts"][0]
    assert shown["last_error"] == "tag-0.safetensors: its digest differs"
    assert {"state", "bytes", "leases", "idle_seconds", "digest", "loads", "evictions", "pinned"} <= shown.keys()
    assert desk.asked.empty()
    desk.split.models.clear()
    assert await json_of(gateway, "/health/lazy") == {"status": "ok", "models": {}}


async def test_health_lazy_needs_the_key(serve: Serve) -> None:
    """It names models and parts, which the open path does not."""
    gateway = await serve(api_key="k" * 20)
    for headers, status in (({}, 401), ({"Authorization": "Bearer " + "k" * 20}, 200)):
        async with gateway.get("/health/lazy", headers=headers) as response:
            assert response.status == status


@pytest.mark.parametrize(
    ("path", "body", "wish"),
    [
        ("/parts/tag/load", None, {"load": "tag"}),
        ("/parts/tag/unload", None, {"unload": "tag"}),
        ("/parts/tag/pin", None, {"pin": "tag"}),
        ("/parts/tag/unpin", None, {"unpin": "tag"}),
        ("/parts/tag/replace", {"by": "tag-2"}, {"replace": {"part": "tag", "by": "tag-2"}}),
        ("/parts/refresh", None, {"refresh": True}),
        ("/rollout", {"level": "off"}, {"level": "off", "percent": None}),
        ("/rollout", {"percent": 25}, {"level": None, "percent": 25.0}),
        ("/rollout", {"level": "manual", "percent": 0}, {"level": "manual", "percent": 0.0}),
    ],
)
async def test_acts_reach_the_desk(
    desk: FakeDesk, serve: Serve, path: str, body: object, wish: dict[str, object]
) -> None:
    """Each path is one wish; the answer is how the parts are then."""
    gateway = await serve()
    async with gateway.post(BASE + path, json=body) as response:
        assert response.status == 200
        assert (await response.json())["parts"][0]["name"] == "tag"
    assert desk.split.acts == [("assistant", wish)]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/rollout", {}, "level"),
        ("/rollout", {"level": "Off"}, "level"),
        ("/rollout", {"level": False}, "level"),
        ("/rollout", {"percent": 101}, "percent"),
        ("/rollout", {"percent": True}, "percent"),
        ("/rollout", {"percent": "5"}, "percent"),
        ("/rollout", {"levle": "off"}, "levle"),
        ("/parts/tag/replace", {}, "by"),
        ("/parts/tag/replace", {"by": 7}, "by"),
    ],
)
async def test_odd_wishes_are_named(desk: FakeDesk, serve: Serve, path: str, body: object, param: str) -> None:
    """What cannot be meant is refused by its field, and no worker hears of it."""
    gateway = await serve()
    async with gateway.post(BASE + path, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)
    assert desk.split.acts == []


async def test_parts_of_one_model(serve: Serve) -> None:
    """The same as in `/health/lazy`, of one; a model without parts says so."""
    gateway = await serve()
    assert (await json_of(gateway, BASE + "/parts"))["level"] == "auto"
    async with gateway.get("/api/models/m/parts") as response:
        assert response.status == 400
        assert "not split" in (await response.json())["error"]["message"]


@pytest.mark.parametrize(
    ("error", "status"),
    [(NotLoaded("assistant", "absent", "…"), 409), (PartRefused("tag-0.safetensors", "its digest differs"), 503)],
)
async def test_refusals_keep_their_status(desk: FakeDesk, serve: Serve, error: Any, status: int) -> None:
    """A worker's own error is what the operator gets."""
    desk.split.refusal = error
    gateway = await serve()
    async with gateway.post(BASE + "/parts/tag/load") as response:
        told = (await response.json())["error"]
    assert (response.status, told["code"], told["message"]) == (status, error.code, error.message)


async def test_metrics_of_parts(desk: FakeDesk, serve: Serve) -> None:
    """Bytes, leases, loads and evictions of each part of a split model; nothing of any other."""
    gateway = await serve()
    async with gateway.get("/metrics") as response:
        assert "pagein_part_bytes{" not in await response.text()
    desk.models = {"assistant": []}
    desk.view_facts = {"parts": parts_view(part_view("tag", bytes=300, leases=2, loads=5, evictions=4))}
    async with gateway.get("/metrics") as response:
        text = await response.text()
    for line in (
        'pagein_part_bytes{model="assistant",part="tag"} 300.0',
        'pagein_part_leases{model="assistant",part="tag"} 2.0',
        'pagein_part_loads_total{model="assistant",part="tag"} 5.0',
        'pagein_part_evictions_total{model="assistant",part="tag"} 4.0',
        'pagein_parts_owned_bytes{model="assistant"} 300.0',
        'pagein_parts_allowance_bytes{model="assistant"} 1000.0',
    ):
        assert line in text
