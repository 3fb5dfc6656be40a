"""The endpoints of saved conversations, before a real store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagein.daemon.kept import Counters
from pagein.errors import SnapshotNotFound
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import FakeDesk
from tests.gateway.test_metrics import samples
from tests.kv.snapshots.build import damage, ids, keep
from tests.saved import saved_in


@pytest.fixture
def store(desk: FakeDesk, tmp_path: Path) -> Any:
    """A store with two snapshots behind the desk."""
    counters = Counters(restored=300, computed=50, cached=400, restores=2, saves=5, misses={"tokens": 3})
    desk.snapshots, store, _ = saved_in(tmp_path / "s", "m", m=counters)
    keep(store, list(range(50)), conversation="a")
    keep(store, list(range(100, 200)), conversation="b")
    return store


async def test_everything_is_shown(desk: FakeDesk, store: Any, serve: Serve) -> None:
    """`/api/state` has what is saved, what it takes and what was reused."""
    gateway = await serve()
    async with gateway.get("/api/state") as response:
        body = await response.json()
    assert [one["tokens"] for one in body["snapshots"]] == [100, 50]
    assert body["usage"]["snapshots"] == 2
    assert body["models"][0]["misses"] == {"tokens": 3}
    assert body["blocks"] == []
    async with gateway.get("/api/state/kv") as response:
        assert await response.json() == {"models": {"p": {"active": 1}}}


async def test_one_or_all_are_removed(store: Any, serve: Serve) -> None:
    """A removed one is gone from the disk; what is not there, or no id at all, is 404."""
    gateway = await serve()
    long, short = store.entries()
    url = f"{gateway.url}/api/state/snapshots"
    async with gateway.session.delete(f"{url}/{short.id}") as response:
        assert response.status == 204
    assert not short.path.exists()
    for name in (short.id, "..%2F..%2Fetc", "x"):
        async with gateway.session.delete(f"{url}/{name}") as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, SnapshotNotFound.code)
    assert ids(store) == {long.id}
    async with gateway.session.delete(url) as response:
        assert await response.json() == {"snapshots": 1, "bytes": long.bytes, "blocks": 0}
    assert ids(store) == set()


async def test_a_damaged_one_is_found(store: Any, serve: Serve) -> None:
    """Verifying answers 200 with the faults, of one or of all."""
    gateway = await serve()
    long, short = store.entries()
    damage(short)
    async with gateway.post("/api/state/verify", json={"id": long.id}) as response:
        told = {"checked": 1, "bytes": long.bytes, "faults": [], "left": 0, "next": None}
        assert await response.json() == told
    async with gateway.post("/api/state/verify") as response:
        body = await response.json()
    assert (response.status, body["checked"], [fault["id"] for fault in body["faults"]]) == (200, 2, [short.id])


async def test_garbage_goes(store: Any, serve: Serve) -> None:
    """A time is seconds or words; without a body it is the configured one."""
    gateway = await serve()
    async with gateway.post("/api/state/gc") as response:
        assert (await response.json())["snapshots"] == 0
    async with gateway.post("/api/state/gc", json={"idle": "7d"}) as response:
        assert (await response.json())["snapshots"] == 0
    async with gateway.post("/api/state/gc", json={"idle": 0}) as response:
        assert (await response.json())["snapshots"] == 2


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("gc", {"idle": "soon"}, "idle"),
        ("gc", {"idle": True}, "idle"),
        ("gc", {"idle": -1}, "idle"),
        ("gc", {"age": 1}, "age"),
        ("verify", {"id": 7}, "id"),
        ("verify", {"ids": []}, "ids"),
        ("verify", [], None),
        ("verify", {"blocks": 7}, "blocks"),
        ("verify", {"blocks": "m", "after": 7}, "after"),
    ],
)
async def test_what_cannot_be_read_is_refused(store: Any, serve: Serve, path: str, body: Any, param: str) -> None:
    """The error names the field, and nothing is removed."""
    gateway = await serve()
    async with gateway.post(f"/api/state/{path}", json=body) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
    assert len(store.entries()) == 2


async def test_switched_off(desk: FakeDesk, serve: Serve) -> None:
    """Every path says that `state` is off, and the metrics have no figures of it."""
    gateway = await serve()
    one = f"/snapshots/{'0' * 24}"
    paths = [("GET", ""), ("DELETE", "/snapshots"), ("DELETE", one), ("POST", "/verify"), ("POST", "/gc")]
    for method, path in paths:
        async with gateway.session.request(method, f"{gateway.url}/api/state{path}") as response:
            error = (await response.json())["error"]
            assert (response.status, error["code"]) == (400, "state_off")
            assert "switched off" in error["message"]
            assert "state.enabled" in error["hint"]
    assert not [name for name in await samples(gateway) if "snapshot" in name or "restore" in name]


async def test_reuse_is_counted(store: Any, serve: Serve) -> None:
    """Tokens by where they came from, restores, saves, misses by kind, and the bytes beside their cap."""
    gateway: Served = await serve()
    seen = await samples(gateway)
    tokens = {source: seen[f'pagein_prompt_tokens_total{{model="m",source="{source}"}}'] for source in
              ("restored", "cached", "computed")}  # fmt: skip
    assert tokens == {"restored": 300, "cached": 100, "computed": 50}
    assert seen['pagein_restores_total{model="m"}'] == 2
    assert seen['pagein_snapshot_saves_total{model="m"}'] == 5
    assert seen['pagein_restore_misses_total{kind="tokens",model="m"}'] == 3
    assert seen["pagein_snapshots"] == 2
    assert seen["pagein_snapshot_bytes"] == sum(entry.bytes for entry in store.entries())
    assert seen["pagein_snapshot_cap_bytes"] == 1_000_000
