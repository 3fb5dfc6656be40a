"""Metrics: what happened is counted, and no client can make them grow."""

from __future__ import annotations

import re

import pytest

from pagein.errors import QueueFull
from pagein.protocol import Capability
from tests.gateway.conftest import Serve, Served
from tests.gateway.fakes import FakeDesk, FakeWorker, RawClient, die, eventually

CHAT = "/v1/chat/completions"


async def samples(gateway: Served) -> dict[str, float]:
    """Return every sample that Prometheus would read, histogram buckets and creation times left out."""
    async with gateway.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    found = re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found if "_bucket{" not in name and "_created" not in name}


async def test_requests_are_counted(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A request is counted once by model, capability and class of status, with its wait and its length."""
    desk.lease_facts = {"waited_seconds": 1.5}
    gateway = await serve()
    async with gateway.post(CHAT, json={"model": "m"}):
        pass
    seen = await samples(gateway)
    assert seen['pagein_requests_total{capability="chat",model="m",status="2xx"}'] == 1
    assert seen['pagein_queue_seconds_sum{model="m"}'] == 1.5
    assert seen['pagein_request_seconds_count{capability="chat",model="m"}'] == 1
    assert seen['pagein_requests_in_flight{model="m"}'] == 0


async def test_requests_in_flight_are_shown(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """While a request waits or computes it is in flight; a disconnect ends it and has a class of its own."""
    worker.answer = FakeWorker.silent
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(CHAT, b'{"model": "m"}')
    await worker.busy()
    assert (await samples(gateway))['pagein_requests_in_flight{model="m"}'] == 1
    await client.leave()
    await desk.settled()
    seen = await samples(gateway)
    assert seen['pagein_requests_in_flight{model="m"}'] == 0
    assert seen['pagein_requests_total{capability="chat",model="m",status="disconnected"}'] == 1


async def test_refusals_and_failures_are_told_apart(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A request that got no lease is a refusal with its code; a worker's death is not."""
    gateway = await serve()
    worker.answer = die
    async with gateway.post(CHAT, json={"model": "m"}):
        pass
    desk.refusal = QueueFull("m", 1, 1)
    async with gateway.post(CHAT, json={"model": "m"}):
        pass
    seen = await samples(gateway)
    refusals = {name: value for name, value in seen.items() if name.startswith("pagein_refusals")}
    assert refusals == {'pagein_refusals_total{code="queue_full",model="m"}': 1}
    assert seen['pagein_requests_total{capability="chat",model="m",status="5xx"}'] == 1
    assert seen['pagein_requests_total{capability="chat",model="m",status="4xx"}'] == 1


async def test_clients_cannot_make_labels(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """Any number of invented names, paths and bodies adds a fixed number of series."""
    gateway = await serve()

    async def provoke(text: str) -> None:
        await (await gateway.post(CHAT, json={"model": text})).release()
        await (await gateway.post(CHAT, data=text)).release()
        await (await gateway.post(f"/run/{text}", json={"input": "x"})).release()
        await (await gateway.post(f"/v1/{text}", json={})).release()

    await provoke("first")
    known = set(await samples(gateway))
    for i in range(20):
        await provoke(f"invented-{i}")
    assert set(await samples(gateway)) == known
    assert not [name for name in known if "first" in name]


async def test_decisions_are_counted(desk: FakeDesk, serve: Serve) -> None:
    """An eviction is a stop or a sleep for another model; other stops and stray names do not count as one."""
    gateway = await serve()
    await eventually(lambda: bool(desk.streams))
    desk.decide("stop", "m", evicted_for="n")
    desk.decide("sleep", "m", evicted_for="n")
    desk.decide("stop", "m", evicted_for=None)
    desk.decide("load", "m")
    await eventually(lambda: all(queue.empty() for queue in desk.streams))
    seen = await samples(gateway)
    assert seen['pagein_evictions_total{model="m"}'] == 2


async def test_the_state_is_shown(serve: Serve) -> None:
    """Pools by state, models by kind of bytes, loads; what is unknown has no sample."""
    gateway = await serve()
    seen = await samples(gateway)
    assert seen['pagein_pool_bytes{pool="ram",state="reserved"}'] == 200
    assert seen['pagein_pool_bytes{pool="ram",state="free"}'] == 2400
    assert seen['pagein_pool_bytes{pool="ram",state="outside"}'] == 0
    levels = [seen[f'pagein_pressure{{level="{level}"}}'] for level in ("calm", "tight", "critical")]
    assert levels == [1, 0, 0]
    assert seen['pagein_model_bytes{kind="held",model="m",pool="ram"}'] == 1000
    assert seen['pagein_loads_total{model="m"}'] == 2
    assert seen['pagein_model_resident{model="m"}'] == 1
    assert not [name for name in seen if "peak" in name or "available" in name or "effective" in name]


@pytest.mark.parametrize("models", [1, 3])
async def test_the_registry_is_its_own(desk: FakeDesk, serve: Serve, models: int) -> None:
    """Two gateways in one process do not share or clash in their metrics."""
    desk.models = {f"m{i}": [Capability.CHAT] for i in range(models)}
    first, second = await serve(), await serve()
    async with first.post(CHAT, json={"model": "nobody"}):
        pass
    assert "pagein_requests_total" in str(await samples(first))
    assert "pagein_requests_total" not in str(await samples(second))
