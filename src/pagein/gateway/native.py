"""``POST /run/{model}``: one path for every model (row G1). Small bodies become those of the capability's own path."""

from __future__ import annotations

import json
import mimetypes
import re
import secrets

from aiohttp import web

from pagein.errors import BadRequest, CapabilityMissing
from pagein.gateway.call import Call, read_body
from pagein.gateway.openai import STREAMING, form_values, is_multipart, json_object
from pagein.gateway.ports import Desk
from pagein.gateway.tasks import Asked, base_of, find_task, task_fields, user_of
from pagein.gateway.wishes import read_wishes, wish_fields
from pagein.protocol import Capability

_PICTURES = (Capability.CLASSIFICATION, Capability.SALIENCY)
_UPLOADS = {"audio": (Capability.TRANSCRIPTION,), "image": _PICTURES}
_FILES = (Capability.TRANSCRIPTION, *_PICTURES)
_LABELS = (Capability.TEXT_CLASSIFICATION, Capability.TOKEN_CLASSIFICATION)
_TEXTS = (Capability.CHAT, Capability.COMPLETION, Capability.EMBEDDING, *_LABELS)
_SIGNS = (
    ("messages", (Capability.CHAT,)),
    ("documents", (Capability.RERANK,)),
    ("prompt", (Capability.COMPLETION,)),
    ("image", _PICTURES),
    ("input", (*_TEXTS, *_PICTURES)),
)
"""Fields that tell what is asked for: the first capability behind the first field there that the model offers."""
_FIELD = re.compile(r"[A-Za-z0-9_]{1,64}(\[\])?")


async def read_run(request: web.Request, desk: Desk, limit: int) -> Call:
    """Read a native request; raises ModelNotFound, CapabilityMissing, BadRequest, RequestTooLarge, or as `find_task`.

    The path may name a task of a split model, too.
    """
    named = request.match_info["model"]
    desk.capabilities(base_of(named))
    body = await read_body(request, limit)
    content_type = request.headers.get("Content-Type", "application/json")
    kind = content_type.partition("/")[0].strip().lower()
    if is_multipart(content_type):
        asked = find_task(desk, named)
        _same_model(named, form_values(body, content_type, "model"))
        return Call(asked.model, _first(desk, asked, _FILES), body, content_type, task=asked.task)
    if kind in _UPLOADS:
        asked = find_task(desk, named)
        fields = [("model", named), *((name, value) for name, value in request.query.items() if name != "model")]
        return _upload(asked, _first(desk, asked, _UPLOADS[kind]), fields, body, content_type)
    if kind == "text":
        return _text(desk, named, body)
    return _json(desk, named, json_object(body))


def _json(desk: Desk, named: str, fields: dict[str, object]) -> Call:
    _same_model(named, [fields["model"]] if "model" in fields else [])
    asked = find_task(desk, named, fields.get("task"))
    usable = next((capabilities for sign, capabilities in _SIGNS if sign in fields), None)
    if usable is None:
        raise BadRequest(
            f"the request to {named!r} has no input",
            hint='send {"input": …}, or the fields of one of the paths under /v1',
            param="input",
        )
    capability = _first(desk, asked, usable)
    wishes, user = read_wishes(fields), user_of(asked, fields)
    own = {*wish_fields(fields), *task_fields(asked, fields)}
    fields = {name: value for name, value in fields.items() if name not in own}
    if "input" in fields:
        fields = _from_input(capability, fields)
    body = json.dumps({**fields, "model": named}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream = capability in STREAMING and fields.get("stream") is True
    return Call(asked.model, capability, body, "application/json", stream, wishes, task=asked.task, user=user)


def _from_input(capability: Capability, fields: dict[str, object]) -> dict[str, object]:
    rest = {name: value for name, value in fields.items() if name != "input"}
    if capability is Capability.CHAT:
        return {**rest, "messages": [{"role": "user", "content": fields["input"]}]}
    if capability is Capability.COMPLETION:
        return {**rest, "prompt": fields["input"]}
    if capability in _PICTURES:
        return {**rest, "image": fields["input"]}
    return fields


def _text(desk: Desk, named: str, body: bytes) -> Call:
    try:
        return _json(desk, named, {"input": body.decode("utf-8")})
    except UnicodeDecodeError as error:
        raise BadRequest(f"the text is not UTF-8: {error}", param="input") from None


def _upload(
    asked: Asked, capability: Capability, fields: list[tuple[str, str]], body: bytes, content_type: str
) -> Call:
    """Wrap raw sound or an image, and the fields of the query, into the form that the capability's path takes."""
    media = content_type.partition(";")[0].strip().lower()
    boundary = secrets.token_hex(16)
    parts = []
    for name, value in fields:
        if not _FIELD.fullmatch(name):
            raise BadRequest(f"the query has an odd field {name[:64]!r}")
        parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n')
    file_name = f"upload{mimetypes.guess_extension(media) or ''}"
    parts.append(f'--{boundary}\r\nContent-Disposition: form-data; name="file"; filename="{file_name}"\r\n')
    parts.append(f"Content-Type: {media}\r\n\r\n")
    form = "".join(parts).encode("utf-8", "surrogateescape") + body + f"\r\n--{boundary}--\r\n".encode()
    return Call(asked.model, capability, form, f"multipart/form-data; boundary={boundary}", task=asked.task)


def _first(desk: Desk, asked: Asked, usable: tuple[Capability, ...]) -> Capability:
    offered = desk.capabilities(asked.model) if asked.capabilities is None else asked.capabilities
    for capability in usable:
        if capability in offered:
            return capability
    raise CapabilityMissing(asked.name, " or ".join(c.value for c in usable), [c.value for c in offered])


def _same_model(named: str, given: list[object]) -> None:
    if any(name not in (named, base_of(named)) for name in given):
        raise BadRequest(f"the path names {named!r}, the body another model", param="model")
