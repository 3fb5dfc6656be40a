"""Who may talk to the daemon."""

from __future__ import annotations

import pytest

from pagein.gateway.auth import is_loopback, is_loopback_origin
from tests.gateway.conftest import Serve
from tests.gateway.fakes import ALL_PATHS, FakeDesk, FakeWorker

KEY = "correct-horse"
GETS = ["/v1/models", "/v1/models/m", "/api/status", "/api/plan?model=m", "/api/decisions", "/api/events", "/metrics"]
POSTS = [*ALL_PATHS, "/api/models/m/load", "/api/models/m/unload", "/api/models/m/pin", "/api/models/m/unpin"]
EVERYTHING = [("GET", p) for p in [*GETS, "/api/models/m/log", "/nowhere"]] + [("POST", p) for p in POSTS]


@pytest.mark.parametrize(
    "given",
    [None, "", KEY, f"Basic {KEY}", "Bearer", "Bearer wrong", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer é"],
)
async def test_nothing_answers_without_the_key(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, given: str | None
) -> None:
    """With a key configured, every path but ``/health`` refuses a missing, wrong or odd one."""
    gateway = await serve(api_key=KEY)
    headers = {} if given is None else {"Authorization": given}
    for method, path in EVERYTHING:
        async with gateway.session.request(method, gateway.url + path, headers=headers) as response:
            assert response.status == 401, (method, path)
            assert response.headers["WWW-Authenticate"] == "Bearer", (method, path)
            assert (await response.json())["error"]["code"] == "unauthorized", (method, path)
            assert KEY not in await response.text(), (method, path)
        assert desk.granted == desk.acts == worker.requests == [], (method, path)


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
async def test_the_key_opens(worker: FakeWorker, serve: Serve, scheme: str) -> None:
    """The right key opens, under any host name and from any page."""
    gateway = await serve(api_key=KEY)
    headers = {"Authorization": f"{scheme} {KEY}", "Origin": "https://example.org", "Host": "gpu.example.org"}
    async with gateway.post("/v1/embeddings", json={"model": "m"}, headers=headers) as response:
        assert response.status == 200


async def test_health_is_open(serve: Serve) -> None:
    """``/health`` answers anyone, and says nothing more than that."""
    gateway = await serve(api_key=KEY)
    async with gateway.get("/health", headers={"Host": "probe"}) as response:
        assert (response.status, await response.json()) == (200, {"status": "ok"})


async def test_a_rebound_name_is_refused(desk: FakeDesk, serve: Serve) -> None:
    """Without a key, a foreign name that DNS points at this machine reaches nothing."""
    gateway = await serve()
    headers = {"Host": "evil.example:7311"}
    for method, path in EVERYTHING:
        async with gateway.session.request(method, gateway.url + path, headers=headers) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (403, "forbidden"), (method, path)
        assert desk.granted == desk.acts == [], (method, path)


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "file://", "http://localhost.evil.example", ""])
async def test_a_foreign_page_changes_nothing(desk: FakeDesk, serve: Serve, origin: str) -> None:
    """Without a key, a POST from a page of another origin is refused, whatever its content type."""
    gateway = await serve()
    headers = {"Origin": origin, "Content-Type": "text/plain"}
    for path in POSTS:
        async with gateway.post(path, data=b'{"model": "m", "input": "x"}', headers=headers) as response:
            assert response.status == 403, path
            assert "Access-Control-Allow-Origin" not in response.headers, path
        assert desk.granted == desk.acts == [], path


@pytest.mark.parametrize(
    "origin", ["http://localhost:3000", "http://127.0.0.1", "http://[::1]:8080", "https://a.example"]
)
async def test_own_and_configured_pages_may_post(worker: FakeWorker, serve: Serve, origin: str) -> None:
    """Pages of this machine and configured origins pass."""
    gateway = await serve(cors=["https://a.example"])
    async with gateway.post("/v1/embeddings", json={"model": "m"}, headers={"Origin": origin}) as response:
        assert response.status == 200


async def test_cors_is_off_unless_configured(worker: FakeWorker, serve: Serve) -> None:
    """No answer carries CORS headers by default, and a preflight is refused."""
    gateway = await serve()
    origin = {"Origin": "http://localhost:3000"}
    async with gateway.get("/v1/models", headers=origin) as response:
        assert not [name for name in response.headers if name.startswith("Access-Control")]
    preflight = {**origin, "Access-Control-Request-Method": "POST"}
    async with gateway.session.options(f"{gateway.url}/v1/embeddings", headers=preflight) as response:
        assert response.status == 403


@pytest.mark.parametrize("path", ["/v1/models", "/nowhere", "/api/events"])
async def test_configured_origins_may_read(serve: Serve, path: str) -> None:
    """Answers name exactly the configured origin that asked, errors and streams included."""
    gateway = await serve(cors=["https://a.example", "https://b.example"])
    async with gateway.get(path, headers={"Origin": "https://b.example"}) as response:
        assert response.headers["Access-Control-Allow-Origin"] == "https://b.example"
        assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        assert response.headers["Vary"] == "Origin"
    async with gateway.get(path, headers={"Origin": "https://c.example"}) as response:
        assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_preflight_needs_no_key(serve: Serve) -> None:
    """Browsers ask before they send the key: a configured origin gets its answer without it."""
    gateway = await serve(cors=["https://a.example"], api_key=KEY)
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization, x-stainless-os"}
    url = f"{gateway.url}/v1/chat/completions"
    async with gateway.session.options(url, headers={**asked, "Origin": "https://a.example"}) as response:
        assert response.status == 204
        assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
        assert response.headers["Access-Control-Allow-Headers"] == "authorization, x-stainless-os"
    async with gateway.session.options(url, headers={**asked, "Origin": "https://z.example"}) as response:
        assert response.status == 403


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True), ("LOCALHOST:80", True), ("127.0.0.1:7311", True), ("127.9.9.9", True),
        ("[::1]:7311", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("192.168.0.1", False), ("[::2]", False),
        ("[", False), ("", False), ("user@evil.example", False), ("localhost@evil.example", False), ("0.0.0.0", False),
    ],
)  # fmt: skip
def test_only_loopback_names_are_local(host: str, local: bool) -> None:
    """Names that DNS can point elsewhere are foreign."""
    assert is_loopback(host) is local
    assert is_loopback_origin(f"http://{host}") is local
