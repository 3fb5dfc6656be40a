"""Bodies of the OpenAI-compatible endpoints: find `model` and `stream` without changing a byte.

Only fields that are meant for Pagein itself are taken out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesHeaderParser

from aiohttp import web

from pagein.errors import BadRequest
from pagein.gateway.call import Call, read_body
from pagein.gateway.ports import Desk
from pagein.gateway.splice import without
from pagein.gateway.tasks import find_task, task_fields, user_of
from pagein.gateway.wishes import read_wishes, wish_fields
from pagein.protocol import Capability

_PART_HEADER_LIMIT = 8 * 1024
_PARTS_LIMIT = 64
_NAME_LIMIT = 200
"""Longer than any name that the configuration allows; keeps hostile names out of error bodies."""
STREAMING = frozenset({Capability.CHAT, Capability.COMPLETION})
"""Capabilities whose `stream: true` answers with events that end with ``[DONE]``."""


async def read_openai(request: web.Request, desk: Desk, capability: Capability, limit: int) -> Call:
    """Read a request of ``/v1/…``; raises BadRequest that names the field, RequestTooLarge, or as `find_task`."""
    body = await read_body(request, limit)
    content_type = request.headers.get("Content-Type", "application/json")
    if is_multipart(content_type):
        asked = find_task(desk, one_model(form_values(body, content_type, "model"))).check(capability)
        return Call(asked.model, capability, body, content_type, task=asked.task)
    if content_type.lstrip()[:6].lower() in ("audio/", "image/"):
        raise BadRequest(
            f"a bare {content_type[:40]} body names no model",
            hint="send a form with `model` and `file`, or POST the file to /run/MODEL",
            param="model",
        )
    fields = json_object(body)
    named = one_model([fields["model"]] if "model" in fields else [])
    if body.count(b'"model"') > 1:
        _refuse_two_models(body)
    asked = find_task(desk, named, fields.get("task")).check(capability)
    stream = capability in STREAMING and fields.get("stream") is True
    wishes = read_wishes(fields)
    body = without(body, [*wish_fields(fields), *task_fields(asked, fields)])
    user = user_of(asked, fields)
    return Call(asked.model, capability, body, "application/json", stream, wishes, task=asked.task, user=user)


def is_multipart(content_type: str) -> bool:
    """Tell whether a Content-Type announces a form with parts."""
    return content_type.lstrip()[:10].lower() == "multipart/"


def json_object(body: bytes) -> dict[str, object]:
    """Parse a body that must be one JSON object; raises BadRequest with the place of the fault."""
    try:
        fields = json.loads(body)
    except RecursionError:
        raise BadRequest("the request body is not usable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise BadRequest(f"the request body must be a JSON object, not {_kind(fields)}")
    return fields


def one_model(values: list[object]) -> str:
    """Return the one model that a request names; raises BadRequest."""
    if not values:
        raise BadRequest("the request names no model", hint="set `model`; see GET /v1/models", param="model")
    if len(values) > 1:
        raise BadRequest(f"the request names {len(values)} models, not one", param="model")
    model = values[0]
    if not isinstance(model, str) or not model:
        raise BadRequest(f"`model` must be a name, not {_kind(model)}", param="model")
    if len(model) > _NAME_LIMIT:
        raise BadRequest(f"`model` has {len(model)} characters, a name has at most 64", param="model")
    return model


def form_values(body: bytes, content_type: str, wanted: str) -> list[object]:
    """Return the text of every part with this name in a multipart form; the body itself stays untouched."""
    return [
        body[start:end].decode("utf-8", "replace").strip()
        for name, start, end in _parts(body, content_type)
        if name == wanted
    ]


def _parts(body: bytes, content_type: str) -> Iterator[tuple[str | None, int, int]]:
    """Yield the name of each part and where its content starts and ends."""
    header = Message()
    header["Content-Type"] = content_type.replace("\r", " ").replace("\n", " ")
    boundary = header.get_boundary()
    if not boundary:
        raise BadRequest("the multipart body has no boundary in its Content-Type")
    mark = b"--" + boundary.encode("utf-8", "surrogateescape")
    at = 0 if body.startswith(mark) else body.find(b"\r\n" + mark) + 2
    if at == 1:
        raise BadRequest("the multipart body does not contain its boundary")
    for _ in range(_PARTS_LIMIT):
        start = at + len(mark)
        if body.startswith(b"--", start):
            return
        end = body.find(b"\r\n" + mark, start)
        blank = body.find(b"\r\n\r\n", start, start + _PART_HEADER_LIMIT)
        if end < 0 or blank < 0 or blank > end:
            raise BadRequest("the multipart body is cut off: a part has no end or no header")
        headers = BytesHeaderParser().parsebytes(body[start:blank].lstrip())
        name = headers.get_param("name", header="content-disposition")
        yield name if isinstance(name, str) else None, blank + 4, end
        at = end + 2
    raise BadRequest(f"the multipart body has more than {_PARTS_LIMIT} parts")


def _refuse_two_models(body: bytes) -> None:
    def check(pairs: list[tuple[str, object]]) -> dict[str, object]:
        fields = dict(pairs)
        fields[_COUNT] = sum(key == "model" for key, _ in pairs)
        return fields

    count = json.loads(body, object_pairs_hook=check)[_COUNT]
    if count > 1:
        raise BadRequest(f"the request names {count} models, not one", param="model")


_COUNT = "\0models"


def _kind(value: object) -> str:
    if isinstance(value, str):
        return "a text" if value else "an empty text"
    kinds = {dict: "an object", list: "a list", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
