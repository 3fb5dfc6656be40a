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
from pagein.gateway.wishes import read_wishes, wish_fields
from pagein.protocol import Capability

_PICTURES = (Capability.CLASSIFICATION, Capability.SALIENCY)
_UPLOADS = {"audio": (Capability.TRANSCRIPTION,), "image": _PICTURES}
_FILES = (Capability.TRANSCRIPTION, *_PICTURES)
_TEXTS = (Capability.CHAT, Capability.COMPLETION, Capability.EMBEDDING)
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
    """Read a native request; raises ModelNotFound, CapabilityMissing, BadRequest or RequestTooLarge."""
    model = request.match_info["model"]
    offered = desk.capabilities(model)
    body = await read_body(request, limit)
    content_type = request.headers.get("Content-Type", "application/json")
    kind = content_type.partition("/")[0].strip().lower()
    if is_multipart(content_type):
        _same_model(model, form_values(body, content_type, "model"))
        return Call(model, _first(model, offered, _FILES), body, content_type)
    if kind in _UPLOADS:
        fields = [("model", model), *((name, value) for name, value in request.query.items() if name != "model")]
        return _upload(model, _first(model, offered, _UPLOADS[kind]), fields, body, content_type)
    if kind == "text":
        return _text(model, offered, body)
    return _json(model, offered, json_object(body))


def _json(model: str, offered: frozenset[Capability], fields: dict[str, object]) -> Call:
    _same_model(model, [fields["model"]] if "model" in fields else [])
    usable = next((capabilities for sign, capabilities in _SIGNS if sign in fields), None)
    if usable is None:
        raise BadRequest(
            f"the request to {model!r} has no input",
            hint='send {"input": …}, or the fields of one of the paths under /v1',
            param="input",
        )
    capability = _first(model, offered, usable)
    wishes = read_wishes(fields)
    own = wish_fields(fields)
    fields = {name: value for name, value in fields.items() if name not in own}
    if "input" in fields:
        fields = _from_input(capability, fields)
    body = json.dumps({**fields, "model": model}, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream = capability in STREAMING and fields.get("stream") is True
    return Call(model, capability, body, "application/json", stream, wishes)


def _from_input(capability: Capability, fields: dict[str, object]) -> dict[str, object]:
    rest = {name: value for name, value in fields.items() if name != "input"}
    if capability is Capability.CHAT:
        return {**rest, "messages": [{"role": "user", "content": fields["input"]}]}
    if capability is Capability.COMPLETION:
        return {**rest, "prompt": fields["input"]}
    if capability in _PICTURES:
        return {**rest, "image": fields["input"]}
    return fields


def _text(model: str, offered: frozenset[Capability], body: bytes) -> Call:
    try:
        return _json(model, offered, {"input": body.decode("utf-8")})
    except UnicodeDecodeError as error:
        raise BadRequest(f"the text is not UTF-8: {error}", param="input") from None


def _upload(model: str, capability: Capability, fields: list[tuple[str, str]], body: bytes, content_type: str) -> Call:
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
    return Call(model, capability, form, f"multipart/form-data; boundary={boundary}")


def _first(model: str, offered: frozenset[Capability], usable: tuple[Capability, ...]) -> Capability:
    for capability in usable:
        if capability in offered:
            return capability
    raise CapabilityMissing(model, " or ".join(c.value for c in usable), [c.value for c in offered])


def _same_model(model: str, named: list[object]) -> None:
    if any(name != model for name in named):
        raise BadRequest(f"the path names {model!r}, the body another model", param="model")
