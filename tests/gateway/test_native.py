"""``POST /run/{model}`` takes the simplest body that can be meant and makes it the path's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pagein.gateway.openai import form_values
from pagein.protocol import PATHS, Capability
from tests.gateway.conftest import Serve
from tests.gateway.fakes import FakeDesk, FakeWorker

C = Capability
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("offers", "body", "path", "sent"),
    [
        ([C.CHAT, C.COMPLETION], {"input": "hi"}, C.CHAT, {"messages": USER}),
        ([C.CHAT, C.COMPLETION], {"input": "hi", "max_tokens": 4}, C.CHAT, {"messages": USER, "max_tokens": 4}),
        ([C.CHAT, C.COMPLETION], {"messages": USER}, C.CHAT, {"messages": USER}),
        ([C.CHAT, C.COMPLETION], {"prompt": "hi"}, C.COMPLETION, {"prompt": "hi"}),
        ([C.COMPLETION], {"input": "hi"}, C.COMPLETION, {"prompt": "hi"}),
        ([C.EMBEDDING], {"input": ["a", "b"]}, C.EMBEDDING, {"input": ["a", "b"]}),
        ([C.RERANK], {"query": "q", "documents": ["d"]}, C.RERANK, {"query": "q", "documents": ["d"]}),
        ([C.SALIENCY], {"image": "AAAA"}, C.SALIENCY, {"image": "AAAA"}),
        (
            [C.CLASSIFICATION, C.SALIENCY],
            {"input": "AAAA", "top_k": 3},
            C.CLASSIFICATION,
            {"image": "AAAA", "top_k": 3},
        ),
        ([C.CHAT], {"model": "m", "messages": USER}, C.CHAT, {"messages": USER}),
    ],
)
async def test_json_goes_to_what_the_model_does(
    desk: FakeDesk,
    worker: FakeWorker,
    serve: Serve,
    offers: list[C],
    body: dict[str, Any],
    path: C,
    sent: dict[str, Any],
) -> None:
    """The fields tell the capability; `input` means the first that the model has."""
    desk.models = {"m": offers}
    gateway = await serve()
    async with gateway.post("/run/m", json=body) as response:
        assert response.status == 200
    assert worker.requests[0][0] == PATHS[path]
    assert json.loads(worker.requests[0][1]) == {"model": "m", **sent}


async def test_plain_text_is_input(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A text body is the simplest prompt."""
    desk.models = {"m": [C.CHAT]}
    gateway = await serve()
    async with gateway.post("/run/m", data="grüß dich", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 200
    assert json.loads(worker.requests[0][1])["messages"] == [{"role": "user", "content": "grüß dich"}]


@pytest.mark.parametrize(
    ("offers", "content_type", "path", "suffix"),
    [
        ([C.TRANSCRIPTION], "audio/x-wav", C.TRANSCRIPTION, ".wav"),
        ([C.CLASSIFICATION], "image/png; q=1", C.CLASSIFICATION, ".png"),
        ([C.SALIENCY], "image/jpeg", C.SALIENCY, ".jpg"),
    ],
)
async def test_raw_files_become_forms(
    desk: FakeDesk, worker: FakeWorker, serve: Serve, offers: list[C], content_type: str, path: C, suffix: str
) -> None:
    """Sound and images are sent as they are and reach the worker as the form that its path takes."""
    desk.models = {"m": offers}
    content = bytes(range(256)) + b"\r\n--\r\n"
    gateway = await serve()
    async with gateway.post("/run/m", data=content, headers={"Content-Type": content_type}) as response:
        assert response.status == 200
    ((got_path, body, headers),) = worker.requests
    assert got_path == PATHS[path]
    assert form_values(body, headers["Content-Type"], "model") == ["m"]
    assert len(form_values(body, headers["Content-Type"], "file")) == 1
    assert content in body
    assert f'filename="upload{suffix}"'.encode() in body


async def test_the_query_adds_fields_to_a_raw_file(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """What a form would carry beside the file stands in the query; the model stays that of the path."""
    desk.models = {"m": [C.TRANSCRIPTION]}
    headers = {"Content-Type": "audio/wav"}
    gateway = await serve()
    query = "response_format=srt&prompt=%0D%0Aa%22b&timestamp_granularities[]=word&model=n"
    async with gateway.post(f"/run/m?{query}", data=b"RIFF", headers=headers) as response:
        assert response.status == 200
    ((_, body, got),) = worker.requests
    for name, value in [
        ("response_format", "srt"),
        ("prompt", 'a"b'),
        ("timestamp_granularities[]", "word"),
        ("model", "m"),
    ]:
        assert form_values(body, got["Content-Type"], name) == [value]
    async with gateway.post("/run/m?a%22%0D%0Ab=1", data=b"RIFF", headers=headers) as response:
        assert response.status == 400


async def test_forms_pass_unchanged(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """A form without `model` is what the worker gets, byte for byte."""
    desk.models = {"m": [C.TRANSCRIPTION]}
    body = b'--B\r\nContent-Disposition: form-data; name="file"\r\n\r\nRIFF\r\n--B--\r\n'
    headers = {"Content-Type": "multipart/form-data; boundary=B"}
    gateway = await serve()
    async with gateway.post("/run/m", data=body, headers=headers) as response:
        assert response.status == 200
    assert worker.requests[0][:2] == (PATHS[C.TRANSCRIPTION], body)


@pytest.mark.parametrize(
    ("offers", "data", "content_type", "status", "says"),
    [
        ([C.CHAT], b"{}", "application/json", 400, "has no input"),
        ([C.CHAT], b'{"model": "n", "input": "x"}', "application/json", 400, "another model"),
        ([C.EMBEDDING], b'{"messages": []}', "application/json", 400, "cannot do chat"),
        ([C.RERANK], b'{"input": "x"}', "application/json", 400, "cannot do chat or completion or embedding or"),
        ([C.CHAT], b"RIFF", "audio/wav", 400, "cannot do transcription"),
        ([C.CHAT], b"PNG", "image/png", 400, "cannot do classification or saliency"),
        ([C.CHAT], b"\xff", "text/plain", 400, "not UTF-8"),
        ([C.CHAT], b"{", "application/json", 400, "not valid JSON"),
    ],
)
async def test_what_does_not_fit_is_named(
    desk: FakeDesk, serve: Serve, offers: list[C], data: bytes, content_type: str, status: int, says: str
) -> None:
    """A body that the model cannot take gives 400 with the reason, and no lease."""
    desk.models = {"m": offers}
    gateway = await serve()
    async with gateway.post("/run/m", data=data, headers={"Content-Type": content_type}) as response:
        assert response.status == status
        assert says in (await response.json())["error"]["message"]
    assert desk.granted == []


async def test_only_configured_names_run(serve: Serve) -> None:
    """The name in the path is looked up, never opened."""
    gateway = await serve()
    async with gateway.post("/run/..%2Fetc", json={"input": "x"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (404, "model_not_found")
