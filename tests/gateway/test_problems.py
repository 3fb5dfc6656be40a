"""Errors of workers and of Pagein, as clients see them."""

from __future__ import annotations

import json

import pytest
from aiohttp import web

from pagein.errors import ContextLengthExceeded, PageinError
from pagein.gateway.problems import from_worker, problem, response_of
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker

LLAMA = {
    "error": {
        "code": 400,
        "message": "request (5000 tokens) exceeds the available context size (4096 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 5000,
        "n_ctx": 4096,
    }
}


@pytest.mark.parametrize("stream", [False, True])
async def test_an_overlong_prompt_is_openais_error(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, stream: bool
) -> None:
    """llama-server's words for an overlong prompt become OpenAI's code with both numbers (row G8)."""

    async def overlong(request: web.Request) -> web.Response:
        return web.json_response(LLAMA, status=400)

    worker.answer = overlong
    gateway = await serve()
    async with gateway.post("/v1/chat/completions", json={"model": "m", "stream": stream}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"], error["type"]) == (400, "context_length_exceeded", "invalid_request_error")
    assert (error["tokens"], error["context"]) == (5000, 4096)
    assert "5000" in error["message"]
    assert "4096" in error["message"]
    assert await desk.settled() == [400]


def test_an_overlong_prompt_without_numbers_is_still_named() -> None:
    """Unknown numbers stay unknown."""
    with pytest.raises(ContextLengthExceeded) as caught:
        from_worker("m", 400, b'{"error": {"type": "exceed_context_size_error", "n_ctx": "?"}}')
    assert (caught.value.details["tokens"], caught.value.details["context"]) == (None, None)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b'{"error":{"code":400,"message":"bad grammar","type":"invalid_request_error"}}'),
        (422, b'{"detail":[{"loc":["body"]}]}'),
        (500, b'{"error": {"message": "CUDA error"}}'),
        (501, b'{"error":{"code":501,"message":"no embeddings","type":"not_supported_error"},"more":1}'),
    ],
)
async def test_a_workers_own_error_passes(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, status: int, body: bytes
) -> None:
    """Status and bytes of a worker's error are not touched where clients can read them; what is JSON is called so."""

    async def fail(request: web.Request) -> web.Response:
        return web.Response(status=status, body=body, headers={"Content-Type": "text/x"})

    worker.answer = fail
    gateway = await serve()
    async with gateway.post("/v1/embeddings", json={"model": "m"}) as response:
        assert (response.status, await response.read()) == (status, body)
        assert response.headers["Content-Type"] == "application/json"
    assert await desk.settled() == [status]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"Internal Server Error", "Internal Server Error"),
        (b'{"detail": "no kernel image"}', "no kernel image"),
        (b'{"error": "no kernel image"}', "no kernel image"),
        (b'{"message": "no kernel image"}', "no kernel image"),
        (b'["no kernel image"]', '["no kernel image"]'),
        (b"\xff\xfe" * 5000, "\ufffd" * 2000),
        (b"[" * 100_000, "[" * 2000),
        (b"", "the worker answered 500 without a message"),
    ],
)
def test_other_failures_of_a_worker_are_put_into_shape(body: bytes, says: str) -> None:
    """A failure that OpenAI clients could not read keeps its message in their shape, with a bounded length."""
    error = json.loads(from_worker("m", 500, body))["error"]
    assert (error["message"], error["type"], error["code"]) == (says, "server_error", "worker_error")


@pytest.mark.parametrize(("method", "path", "status"), [("GET", "/v1/nothing", 404), ("GET", "/v1/embeddings", 405)])
async def test_unknown_paths_are_json_too(serve: Serve, method: str, path: str, status: int) -> None:
    """A wrong path or method is told in the same shape."""
    gateway = await serve()
    async with gateway.session.request(method, gateway.url + path) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"] == f"there is no {method} {path}"
        assert response.headers.get("Allow") == ("POST" if status == 405 else None)
        assert "X-Request-Id" in response.headers


@pytest.mark.parametrize("given", ["", "a b", "x" * 65, "é", "a\tb"])
async def test_odd_request_ids_are_replaced(serve: Serve, given: str) -> None:
    """Only short plain ids of clients are repeated in answers and logs."""
    gateway = await serve()
    async with gateway.get("/health", headers={"X-Request-Id": given}) as response:
        made = response.headers["X-Request-Id"]
    assert made != given
    assert len(made) == 32


def _kinds(root: type[PageinError]) -> list[type[PageinError]]:
    return [kind for sub in root.__subclasses__() for kind in (sub, *_kinds(sub))]


@pytest.mark.parametrize("kind", [PageinError, *_kinds(PageinError)])
def test_every_error_has_a_whole_body(kind: type[PageinError]) -> None:
    """Any error of Pagein gives OpenAI's four fields, and its own status; details cannot overwrite them."""
    error = kind.__new__(kind)
    PageinError.__init__(error, "it broke", hint="mend it", numbers=[1, None], code="x", param="p", odd=object())
    body = problem(error)["error"]
    assert body["message"] == "it broke"
    assert body["code"] == kind.code
    assert body["param"] == "p"
    assert body["hint"] == "mend it"
    assert body["numbers"] == [1, None]
    response = response_of(error)
    assert response.status == kind.http_status
    assert isinstance(response.body, bytes)
    assert json.loads(response.body)["error"]["code"] == kind.code
