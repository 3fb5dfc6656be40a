"""Programs beside Pagein ask for memory, and give it back."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict

import pytest

from pagein.errors import ConfigError, NoRoom
from pagein.gateway.leases import Leases
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, RawClient, eventually

GIB = 1024**3
PATH = "/api/leases"


@pytest.mark.parametrize(
    ("body", "wish"),
    [
        ({"bytes": "8GiB", "ttl": "10m"}, ("ram", 8 * GIB, 600.0, None, None, "")),
        ({"bytes": 2 * GIB, "ttl": 1.5, "wait": 0}, ("ram", 2 * GIB, 1.5, 0.0, None, "")),
        (
            {"pool": "cuda:0", "bytes": "1GiB", "pid": 77, "wait": "30s", "holder": "train é"},
            ("cuda:0", GIB, None, 30.0, 77, "train é"),
        ),
        ({"bytes": "1GiB", "pid": 77, "ttl": None, "wait": None, "pool": None}, ("ram", GIB, None, None, 77, "")),
    ],
)
async def test_a_lease_is_given(
    desk: FakeDesk, serve: Serve, body: dict[str, object], wish: tuple[object, ...]
) -> None:
    """The wish reaches the desk in bytes and seconds; the answer is the lease and where it is."""
    gateway = await serve()
    async with gateway.post(PATH, json=body) as response:
        assert (response.status, response.headers["Location"]) == (201, "/api/leases/r1")
        assert await response.json() == asdict(desk.rooms["r1"])
    assert desk.wishes == [wish]


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "bytes", "needs `bytes`"),
        ({"bytes": "8 gigs", "ttl": 1}, "bytes", "not a size: '8 gigs'"),
        ({"bytes": 8, "ttl": 1}, "bytes", "8 B is less than 1.0 MiB"),
        ({"bytes": -1, "ttl": 1}, "bytes", "cannot be negative"),
        ({"bytes": 1e9, "ttl": 1}, "bytes", "not a size"),
        ({"bytes": True, "ttl": 1}, "bytes", "not a size"),
        ({"bytes": 10**40, "ttl": 1}, "bytes", "too large"),
        ({"bytes": "1GiB"}, "ttl", "needs `ttl` or `pid`"),
        ({"bytes": "1GiB", "ttl": 0}, "ttl", "above 0"),
        ({"bytes": "1GiB", "ttl": "soon"}, "ttl", "not a duration"),
        ({"bytes": "1GiB", "ttl": -1}, "ttl", "negative"),
        ({"bytes": "1GiB", "ttl": [1]}, "ttl", "not a duration"),
        ({"bytes": "1GiB", "ttl": 1, "wait": "x"}, "wait", "not a duration"),
        ({"bytes": "1GiB", "pid": 0}, "pid", "number of a process"),
        ({"bytes": "1GiB", "pid": "7"}, "pid", "number of a process"),
        ({"bytes": "1GiB", "pid": 2**40}, "pid", "number of a process"),
        ({"bytes": "1GiB", "ttl": 1, "pool": 3}, "pool", "must be a text"),
        ({"bytes": "1GiB", "ttl": 1, "holder": "a\x1b[31m"}, "holder", "printable"),
        ({"bytes": "1GiB", "ttl": 1, "holder": "a" * 201}, "holder", "200"),
        ({"bytes": "1GiB", "ttll": 1}, "ttll", "did you mean ttl?"),
        ({"size": "1GiB", "ttl": 1}, "size", "there is no field 'size'"),
    ],
)
async def test_odd_wishes_are_named(
    desk: FakeDesk, serve: Serve, body: dict[str, object], param: str, says: str
) -> None:
    """Each fault gives 400 with the field, and nothing is asked of the desk."""
    gateway = await serve()
    async with gateway.post(PATH, json=body) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, param)
    assert says in error["message"]
    assert desk.wishes == []


async def test_no_room_says_both_numbers(desk: FakeDesk, serve: Serve) -> None:
    """The refusal of the desk is the answer, its numbers beside the message."""
    desk.refusal = NoRoom("8.0 GiB of ram, 2.0 GiB could be free", need_bytes=8 * GIB, available_bytes=2 * GIB)
    gateway = await serve()
    async with gateway.post(PATH, json={"bytes": "8GiB", "ttl": 5}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "no_room")
    assert (error["need_bytes"], error["available_bytes"]) == (8 * GIB, 2 * GIB)


async def test_a_client_that_leaves_takes_its_wish_back(desk: FakeDesk, serve: Serve) -> None:
    """Nothing is held for who has gone while it waited."""
    desk.gate.clear()
    gateway = await serve()
    client = await RawClient.connect(gateway.port)
    await client.send(PATH, json.dumps({"bytes": "1GiB", "ttl": 60}).encode())
    await eventually(lambda: desk.waiting == 1)
    await client.leave()
    assert await desk.settled() == []
    assert desk.given_up == 1
    assert desk.rooms == {}


async def test_a_lease_that_nobody_hears_of_is_given_back(desk: FakeDesk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that leaves in the moment of the grant does not hold memory until the time to live ends."""
    from aiohttp import web
    from aiohttp.test_utils import make_mocked_request

    async def gone(self: web.Response, request: web.Request) -> None:
        assert list(desk.rooms) == ["r1"]
        raise ConnectionResetError

    async def body(request: web.Request, limit: int) -> bytes:
        return b'{"bytes": "1GiB", "ttl": 60}'

    monkeypatch.setattr("pagein.gateway.leases.read_body", body)
    monkeypatch.setattr(web.Response, "prepare", gone)
    with pytest.raises(ConnectionResetError):
        await Leases(desk).take(make_mocked_request("POST", PATH))
    assert desk.rooms == {}


async def test_leases_are_listed_extended_and_given_back(desk: FakeDesk, serve: Serve) -> None:
    """The life of a lease over HTTP; afterwards it is not found."""
    gateway = await serve()
    async with gateway.post(PATH, json={"bytes": "1GiB", "ttl": 60}) as response:
        lease = await response.json()
    async with gateway.get(PATH) as response:
        assert await response.json() == {"leases": [lease]}
    async with gateway.post(f"{PATH}/r1/extend", json={"ttl": "1h"}) as response:
        assert await response.json() == {**lease, "expires_in_seconds": 3600.0}
    async with gateway.session.delete(f"{gateway.url}{PATH}/r1") as response:
        assert response.status == 204
    for ask in (gateway.session.delete(f"{gateway.url}{PATH}/r1"), gateway.post(f"{PATH}/r1/extend", json={"ttl": 1})):
        async with ask as response:
            assert (response.status, (await response.json())["error"]["code"]) == (404, "lease_not_found")


@pytest.mark.parametrize("body", [{}, {"ttl": 0}, {"ttl": None}, {"ttl": "x"}, {"ttl": 5, "wait": 1}])
async def test_an_extension_needs_a_time(desk: FakeDesk, serve: Serve, body: dict[str, object]) -> None:
    """Without a time, or with more than that, it is refused."""
    gateway = await serve()
    async with gateway.post(f"{PATH}/r1/extend", json=body) as response:
        assert response.status == 400


async def test_a_foreign_page_cannot_touch_leases(desk: FakeDesk, serve: Serve) -> None:
    """DELETE is guarded as POST is."""
    gateway = await serve()
    headers = {"Origin": "https://evil.example"}
    async with gateway.session.delete(f"{gateway.url}{PATH}/r1", headers=headers) as response:
        assert response.status == 403


async def test_a_reload_shows_what_changed(desk: FakeDesk, serve: Serve) -> None:
    """The desk's answer, field by field."""
    gateway = await serve()
    async with gateway.post("/api/reload") as response:
        assert (response.status, await response.json()) == (200, asdict(desk.reloaded))


async def test_a_wrong_configuration_is_told_with_every_fault(desk: FakeDesk, serve: Serve) -> None:
    """400, since the file is at fault and not the daemon, with the list for programs."""
    faults = [{"line": 1, "variable": None, "key": "a", "message": "unknown key"}] * 2
    desk.refusal = ConfigError("pagein.yaml: 2 errors\n  line 1: a: …\n  line 2: b: …", faults=faults)
    gateway = await serve()
    async with gateway.post("/api/reload") as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["faults"]) == (400, "invalid_config", faults)
    assert error["message"].count("\n") == 2


async def test_leases_wait_side_by_side(desk: FakeDesk, serve: Serve) -> None:
    """One that waits does not hold up the others or the questions."""
    desk.gate.clear()
    gateway = await serve()
    asking = [asyncio.create_task(gateway.post(PATH, json={"bytes": "1GiB", "ttl": 9}).__aenter__()) for _ in range(3)]
    await eventually(lambda: desk.waiting == 3)
    async with gateway.get(PATH) as response:
        assert await response.json() == {"leases": []}
    desk.gate.set()
    assert [(await task).status for task in asking] == [201] * 3
