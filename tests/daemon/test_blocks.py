"""Workers that keep KV caches by themselves: what the daemon tells them, what it divides, and what it sees to go."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from pagein.catalog.model import ModelEntry, Need, NeedSource
from pagein.config.schema import Settings
from pagein.daemon import blocks as module
from pagein.daemon.idle_store import Busy
from pagein.daemon.keeper import Keeper
from pagein.errors import ModelNotFound
from pagein.gateway.ports import Prepared
from pagein.history import Gone, TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.protocol import (
    BLOCKS_WAY,
    KV_CONVERSATION_HEADER,
    KV_PATH,
    KV_TENANT_HEADER,
    Capability,
    Endpoint,
    Ready,
    StateFacts,
)

CHAT = "/v1/chat/completions"
MIB = 1024**2
BOUND = 20.0


def entry(name: str, engine: str = "transformers") -> ModelEntry:
    """A configured model."""
    need = Need({"ram": 1}, NeedSource.DECLARED, "declared")
    return ModelEntry(name, engine, "1", frozenset({Capability.CHAT}), None, "cpu", need, need, "key")


class Told:
    """A worker's side of the path: what it was asked to do, in order."""

    def __init__(self) -> None:
        self.wishes: list[dict[str, Any]] = []
        self.status = 200
        self.endpoint = Endpoint()

    async def act(self, request: web.Request) -> web.Response:
        """Note a wish."""
        self.wishes.append(await request.json())
        return web.json_response({"conversations": 2, "bytes": 300}, status=self.status)

    async def show(self, request: web.Request) -> web.Response:
        """Show a pool."""
        return web.json_response({"active": 1}, status=self.status)


@pytest.fixture
async def told():
    """A worker that answers on a socket."""
    made = Told()
    app = web.Application()
    app.router.add_post(KV_PATH, made.act)
    app.router.add_get(KV_PATH, made.show)
    runner = web.AppRunner(app)
    await runner.setup()
    folder = tempfile.mkdtemp(prefix="pi-")
    await web.UnixSite(runner, f"{folder}/w").start()
    made.endpoint = Endpoint(socket=f"{folder}/w")
    yield made
    await runner.cleanup()
    shutil.rmtree(folder)


@pytest.fixture
async def keeper(tmp_path: Path):
    """A keeper with room for 100 MiB."""
    settings = {"state_dir": str(tmp_path), "models": {}, "state": {"disk": 100 * MIB}}
    made = Keeper.open(tmp_path / "kv", Settings.model_validate(settings))
    assert made is not None
    yield made
    await made.close()


def begin(keeper: Keeper, told: Told, name: str = "m") -> None:
    """Its worker is ready."""
    facts = StateFacts(BLOCKS_WAY, "", 4, "b", 4096, "bf16", "bf16")
    keeper.begin(entry(name), Ready("t", told.endpoint, [Capability.CHAT], "1", 4096, state=facts))


async def test_each_request_says_whose_turn_it_is(keeper, told):
    """The tenant with each, the conversation where it is kept; another model's worker is told nothing."""
    begin(keeper, told)
    prepared = await keeper.prepare("m", CHAT, b"{}", TurnOf("conv_1", 1.0))
    assert prepared.headers == {KV_TENANT_HEADER: keeper._tenant, KV_CONVERSATION_HEADER: "conv_1"}
    assert (prepared.body, prepared.miss) == (b"{}", None)
    assert (await keeper.prepare("m", CHAT, b"{}")).headers == {KV_TENANT_HEADER: keeper._tenant}
    assert (await keeper.prepare("other", CHAT, b"{}")).headers == {}
    keeper.forget("m")
    assert (await keeper.prepare("m", CHAT, b"{}")).headers == {}


async def test_what_it_says_that_it_reused_is_counted(keeper, told):
    """Restored, still there, computed and missed; an odd word for a miss makes no label of its own."""
    begin(keeper, told)
    prepared = await keeper.prepare("m", CHAT, b"{}")
    for counted in (
        Counted(90, 10, restored=60),
        Counted(50, 5, restored=0),
        Counted(0, 30, restored=0, miss="empty: nothing is there"),
        Counted(0, 30, restored=0, miss="\n# oops"),
        None,
    ):
        assert keeper.account("m", prepared, counted) is None
    counters = keeper.counters["m"]
    assert (counters.restores, counters.restored, counters.cached, counters.computed) == (1, 60, 140, 75)
    assert counters.misses == {"empty": 1, "other": 1}


async def test_a_deletion_reaches_the_worker(keeper, told):
    """It ends once the worker has let go, and is told again after a turn that was under way."""
    begin(keeper, told)
    prepared = await keeper.prepare("m", CHAT, b"{}", TurnOf("conv_1", 0.0))
    gone = Gone(keeper._tenant, "conv_1")
    async with asyncio.timeout(BOUND):
        await keeper.forget_conversations([gone], True)
    assert told.wishes == [{"forget": [list(gone)]}]
    keeper.account("m", prepared, Counted(1, 1, restored=0))
    async with asyncio.timeout(BOUND):
        await asyncio.gather(*keeper._tasks)
    assert told.wishes == [{"forget": [list(gone)]}] * 2
    other = await keeper.prepare("m", CHAT, b"{}", TurnOf("conv_2", 0.0))
    keeper.account("m", other, Counted(1, 1, restored=0))
    await asyncio.gather(*keeper._tasks)
    assert len(told.wishes) == 2


async def test_a_store_that_is_locked_is_told_later(keeper, told, monkeypatch):
    """A worker that loads has it: it is told once it is ready; one that never gets there leaves it to the daemon."""
    forgotten: list[tuple[str, set[Gone]]] = []
    locked = {"m", "n"}

    def forget_in(folder: Path, gone: set[Gone]) -> None:
        if folder.name in locked:
            raise Busy("a worker has it")
        forgotten.append((folder.name, gone))

    monkeypatch.setattr(module, "forget_in", forget_in)
    for name in ("m", "n"):
        (keeper.blocks._root / name).mkdir(parents=True)
    gone = Gone(keeper._tenant, "conv_1")
    async with asyncio.timeout(BOUND):
        await keeper.forget_conversations([gone], True)
    assert (told.wishes, forgotten) == ([], [])
    locked.clear()
    begin(keeper, told)
    keeper.forget("n")
    async with asyncio.timeout(BOUND):
        await asyncio.gather(*keeper._tasks)
    assert told.wishes == [{"forget": [list(gone)]}]
    assert forgotten == [("n", {gone})]


async def test_the_disk_is_divided(keeper):
    """Snapshots get half where a model makes any; the stores share the rest, and the sum is the cap."""
    both = {"a": entry("a"), "b": entry("b"), "c": entry("c", "llama_cpp"), "d": entry("d", "onnx")}
    assert keeper.blocks.place("a", both) == (keeper.blocks._root / "a", 25 * MIB)
    assert keeper.store.usage().cap == 50 * MIB
    assert keeper.blocks.place("c", both) is None
    only = {"a": entry("a")}
    assert keeper.blocks.place("a", only) == (keeper.blocks._root / "a", 100 * MIB)
    assert keeper.store.usage().cap == 0, "there are none, and no model makes any"
    keeper.blocks.divide({"c": entry("c", "llama_cpp")})
    assert keeper.store.usage().cap == 100 * MIB


async def test_stores_of_models_that_are_gone_are_removed(keeper):
    """At the start; those of configured models stay."""
    for name in ("a", "old"):
        (keeper.blocks._root / name).mkdir(parents=True)
    keeper.sweep(set(), {"a": entry("a")})
    assert [folder.name for folder in keeper.blocks._root.iterdir()] == ["a"]


async def test_all_and_old_ones_are_thinned_out(keeper, told):
    """What a worker let go is counted; one that fails takes nothing from the others."""
    begin(keeper, told)
    left = await keeper.blocks.thin_out(60.0)
    assert (left.conversations, left.bytes) == (2, 300)
    await keeper.blocks.thin_out(None)
    assert told.wishes == [{"idle": 60.0}, {"all": True}]
    told.status = 500
    assert (await keeper.blocks.thin_out(None)).bytes == 0


async def test_pools_are_shown(keeper, told):
    """As each worker reports it; one that does not answer says so."""
    begin(keeper, told)
    assert await keeper.blocks.reports() == {"m": {"active": 1}}
    (view,) = await keeper.blocks.views()
    assert (view.model, view.bytes, view.live) == ("m", 0, True)
    told.status = 500
    assert "500" in (await keeper.blocks.reports())["m"]["error"]


def test_a_prepared_request_without_a_worker_of_its_own_is_as_before():
    """No header is made up."""
    assert Prepared(b"").headers == {}


async def test_a_store_is_read_through_by_who_has_it(keeper, told, monkeypatch):
    """The worker while one lives, else the daemon; a model without one is refused."""
    begin(keeper, told)
    assert (await keeper.blocks.check("m", None))["bytes"] == 300
    await keeper.blocks.check("m", "8192-0-3")
    assert told.wishes == [{"check": ""}, {"check": "8192-0-3"}]
    asked = []
    monkeypatch.setattr(module, "check", lambda folder, after: asked.append((folder.name, after)) or {"checked": 1})
    keeper.forget("m")
    (keeper.blocks._root / "m").mkdir(parents=True)
    assert await keeper.blocks.check("m", "8192-0-3") == {"checked": 1}
    assert asked == [("m", "8192-0-3")]
    with pytest.raises(ModelNotFound):
        await keeper.blocks.check("../other", None)
