"""Bodies are read with limits, and what cannot be understood is named."""

from __future__ import annotations

import contextlib
import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagein.errors import BadRequest
from pagein.gateway.openai import form_values
from pagein.protocol import Capability
from tests.gateway.conftest import Serve
from tests.gateway.fakes import ALL_PATHS, FakeDesk, FakeWorker, RawClient, request_for

EMBED = "/v1/embeddings"
DEEP = b'{"model": "m", "input": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"", "not valid JSON"),
        (b'{"model": "m"', "not valid JSON"),
        (b'{"model": "m", "input": "\xff"}', "not valid JSON"),
        (DEEP, "nested too deeply"),
        (b'{"model": "m", "n": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'["m"]', "must be a JSON object, not a list"),
        (b"null", "must be a JSON object, not null"),
        (b'"m"', "must be a JSON object, not a text"),
        (b"{}", "names no model"),
        (b'{"model": null}', "`model` must be a name, not null"),
        (b'{"model": 5}', "`model` must be a name, not a number"),
        (b'{"model": ""}', "`model` must be a name, not an empty text"),
        (b'{"model": {"model": "m"}}', "`model` must be a name, not an object"),
        (b'{"model": "m", "input": 1, "model": "n"}', "names 2 models"),
        (b'{"model": "' + b"x" * 500 + b'"}', "`model` has 500 characters"),
    ],
)
async def test_bad_json_is_named(desk: FakeDesk, serve: Serve, body: bytes, says: str) -> None:
    """Each fault of a JSON body gives 400 with what is wrong, in OpenAI's shape, and takes no lease."""
    gateway = await serve()
    async with gateway.post(EMBED, data=body, headers={"Content-Type": "application/json"}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_request")
    assert says in error["message"]
    assert desk.granted == []


async def test_a_bare_file_is_told_where_to_go(serve: Serve) -> None:
    """Sound without a form names no model: the hint says what to do."""
    gateway = await serve()
    headers = {"Content-Type": "audio/wav"}
    async with gateway.post("/v1/audio/transcriptions", data=b"RIFF", headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["param"]) == (400, "model")
    assert "/run/MODEL" in error["hint"]


async def test_a_missing_model_is_the_named_parameter(serve: Serve) -> None:
    """OpenAI clients show which parameter is wrong: it stands in ``param``."""
    gateway = await serve()
    async with gateway.post(EMBED, json={}) as response:
        assert (await response.json())["error"]["param"] == "model"


async def test_model_may_stand_inside_other_fields(worker: FakeWorker, serve: Serve) -> None:
    """Only a second `model` at the top is refused, not the word elsewhere."""
    gateway = await serve()
    body = {"model": "m", "input": ['"model"', {"model": "x"}], "tools": [{"model": "y"}, {"model": "z"}]}
    async with gateway.post(EMBED, json=body) as response:
        assert response.status == 200


async def test_an_unknown_model_is_not_found(serve: Serve) -> None:
    """A name that the configuration does not have gives 404 and the names that it has."""
    gateway = await serve()
    async with gateway.post(EMBED, json={"model": "../../etc/passwd"}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (404, "model_not_found")
    assert error["message"].endswith("configured: m")


async def test_what_a_model_cannot_do_is_refused(desk: FakeDesk, serve: Serve) -> None:
    """A model without the capability of the path gives 400 and what it offers."""
    desk.models = {"m": [Capability.CHAT]}
    gateway = await serve()
    async with gateway.post(EMBED, json={"model": "m"}) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "capability_missing")
    assert "chat" in error["message"]


@pytest.mark.parametrize("path", ALL_PATHS)
async def test_too_large_a_body_is_refused_unread(desk: FakeDesk, worker: FakeWorker, serve: Serve, path: str) -> None:
    """A body whose announced length passes the limit is refused before it arrives."""
    gateway = await serve(max_body=1024)
    client = await RawClient.connect(gateway.port)
    await client.send(path, b"x" * 1025, cut=1025)
    head = await client.until(b"\r\n\r\n")
    assert b" 413 " in head
    assert b"request_too_large" in await client.until(b"}}")
    await client.leave()
    assert desk.granted == worker.requests == []


async def test_too_large_a_body_of_unknown_length_is_refused(desk: FakeDesk, worker: FakeWorker, serve: Serve) -> None:
    """The limit also holds for chunked bodies, and for what a compressed body becomes."""
    gateway = await serve(max_body=10_000)
    body = json.dumps({"model": "m", "input": "x" * 20_000}).encode()

    async def pieces():  # type: ignore[no-untyped-def]
        yield body

    async with gateway.post(EMBED, data=pieces()) as response:
        assert response.status == 413
        assert (await response.json())["error"]["limit_bytes"] == 10_000
    async with gateway.post(EMBED, data=gzip.compress(body), headers={"Content-Encoding": "gzip"}) as response:
        assert response.status == 413
    assert worker.requests == []


async def test_a_body_that_does_not_unpack_is_named(serve: Serve) -> None:
    """A body that claims to be compressed and is not gives 400."""
    gateway = await serve()
    async with gateway.post(EMBED, data=b"{}" * 50, headers={"Content-Encoding": "gzip"}) as response:
        assert (response.status, (await response.json())["error"]["code"]) == (400, "invalid_request")


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a multipart body with the boundary B."""
    return (
        b"".join(
            b"--B\r\nContent-Disposition: form-data; " + head.encode() + b"\r\n\r\n" + value + b"\r\n"
            for head, value in parts
        )
        + b"--B--\r\n"
    )


FORM = "multipart/form-data; boundary=B"
FILE = 'name="file"; filename="model.wav"'


@pytest.mark.parametrize(
    ("body", "content_type", "says"),
    [
        (form((FILE, b"x")), FORM, "names no model"),
        (form(('name="model"', b"m"), ('name="model"', b"n")), FORM, "names 2 models"),
        (form(('name="model"', b"m"))[:-12], FORM, "cut off"),
        (form(('name="model"', b"m")), "multipart/form-data", "no boundary"),
        (form(('name="model"', b"m")), "multipart/form-data; boundary=C", "does not contain its boundary"),
        (b"", FORM, "does not contain its boundary"),
        (form(*[(f'name="{i}"', b"") for i in range(100)]), FORM, "more than 64 parts"),
        (form(('name="x"; y="' + "z" * 9000 + '"', b"")), FORM, "cut off"),
    ],
)
async def test_bad_forms_are_named(desk: FakeDesk, serve: Serve, body: bytes, content_type: str, says: str) -> None:
    """Each fault of a form gives 400 with what is wrong."""
    gateway = await serve()
    headers = {"Content-Type": content_type}
    async with gateway.post("/v1/audio/transcriptions", data=body, headers=headers) as response:
        error = (await response.json())["error"]
    assert (response.status, error["code"]) == (400, "invalid_request")
    assert says in error["message"]
    assert desk.granted == []


def test_forms_are_read_in_all_their_spellings() -> None:
    """Unquoted names, more headers, a preamble and quoted boundaries are all the same form."""
    body = (
        b"a preamble\r\n--a b\r\ncontent-type: text/plain\r\ncontent-disposition: form-data; name=model\r\n\r\n m \r\n"
        b'--a b\r\nContent-Disposition: form-data; filename="x"; name="file"\r\n\r\n\r\n--a b--'
    )
    assert form_values(body, 'multipart/form-data; boundary="a b"', "model") == ["m"]
    assert form_values(body, 'Multipart/Form-Data; Boundary="a b"', "file") == [""]


def test_a_file_name_is_no_field_name() -> None:
    """A file that is called ``model`` does not choose one."""
    body = form(('filename="model"; name="file"', b"wrong"), ('name="model"', b"right"))
    assert form_values(body, FORM, "model") == ["right"]


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_the_content_of_a_file_never_names_a_model(before: bytes, after: bytes) -> None:
    """Whatever a file contains, short of the boundary itself, the model is the field's value."""
    content = before.replace(b"--B", b"") + after.replace(b"--B", b"")
    body = form((FILE, content), ('name="model"', b"m"))
    if content.endswith(b"\r\n--") or b"--B" in content:
        return
    assert form_values(body, FORM, "model") == ["m"]


@given(st.binary(max_size=200))
def test_no_form_breaks_the_reader(rest: bytes) -> None:
    """Any bytes after a boundary are either read or refused."""
    with contextlib.suppress(BadRequest):
        form_values(b"--B" + rest, FORM, "model")


async def test_a_forms_model_is_found(worker: FakeWorker, serve: Serve) -> None:
    """The model field is found before and after the file."""
    gateway = await serve()
    for body in (form((FILE, b"RIFF"), ('name="model"', b"m")), request_for("/v1/audio/transcriptions")[0]):
        async with gateway.post("/v1/audio/transcriptions", data=body, headers={"Content-Type": FORM}) as response:
            assert response.status == 200
