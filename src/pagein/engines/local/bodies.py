"""Reads request bodies: a JSON object, or a file that comes as a form, as JSON with base64, or as the body itself."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterable
from dataclasses import dataclass

from aiohttp import web
from multidict import MultiDictProxy

from pagein.engines.local.fields import Fields, refuse
from pagein.errors import BadRequest

_UNTYPED = "application/octet-stream"
Form = MultiDictProxy[str | bytes | bytearray | web.FileField]


@dataclass(frozen=True, slots=True)
class Upload:
    """A file with the fields that came with it."""

    data: bytes
    fields: Fields


async def read_json(request: web.Request, known: Iterable[str]) -> Fields:
    """Return the fields of a JSON body."""
    return Fields(await _json_object(request), known)


async def read_upload(request: web.Request, kind: str, names: tuple[str, ...], known: Iterable[str]) -> Upload:
    """Return a file of a kind, ``audio`` or ``image``, and its fields.

    It is the part of a form called one of ``names``, or the whole body of type ``kind/*`` with fields in the query, or
    (images) base64 or a data: URL in the JSON field of the first name.
    """
    media = request.content_type.lower()
    if media == "multipart/form-data":
        return _from_form(await _form(request), names, known)
    if media.startswith(f"{kind}/") or media == _UNTYPED:
        return Upload(await request.read(), Fields(dict(request.query), known))
    if media == "application/json" and kind == "image":
        fields = Fields(await _json_object(request), (*known, names[0]))
        return Upload(_from_base64(names[0], fields.need(names[0])), fields)
    shapes = "a multipart/form-data form, a JSON object" if kind == "image" else "a multipart/form-data form"
    raise BadRequest(f"Content-Type is {media[:80]!r}; send {shapes} or a body of type {kind}/*", param="Content-Type")


async def _form(request: web.Request) -> Form:
    try:
        return await request.post()
    except (ValueError, LookupError, RuntimeError) as error:  # what the parser raises for damage of each kind
        raise BadRequest(f"the form cannot be read: {error}") from error


async def _json_object(request: web.Request) -> dict[str, object]:
    try:
        value = json.loads(await request.read())
    except RecursionError:
        raise BadRequest("the request body is nested too deeply") from None
    except ValueError as error:
        raise BadRequest(f"the request body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadRequest(f"the request body must be a JSON object, not {type(value).__name__}")
    return value


def _from_form(form: Form, names: tuple[str, ...], known: Iterable[str]) -> Upload:
    data: bytes | None = None
    values: dict[str, object] = {}
    for name in dict.fromkeys(form.keys()):
        parts = form.getall(name)
        if name in names:
            if data is not None or len(parts) > 1:
                refuse(name, f"{name} is not the only file; one is taken")
            data = _part_bytes(name, parts[0])
        elif name.endswith("[]"):
            values[name.removesuffix("[]")] = [str(part) for part in parts]
        elif isinstance(parts[-1], str):
            values[name] = parts[-1]
        else:
            refuse(name, f"{name} must be a text, not a file")
    if data is None:
        refuse(names[0], f"{names[0]} is missing: the form has no part of that name")
    return Upload(data, Fields(values, known))


def _part_bytes(name: str, part: str | bytes | bytearray | web.FileField) -> bytes:
    if isinstance(part, web.FileField):
        return part.file.read()
    if isinstance(part, str):
        refuse(name, f"{name} must be a file: give the part a filename")
    return bytes(part)


def _from_base64(name: str, value: object) -> bytes:
    if not isinstance(value, str):
        refuse(name, f"{name} must be base64 or a data: URL")
    if value[:5].lower() == "data:":
        head, _, value = value.partition(",")
        if not head.lower().endswith(";base64"):
            refuse(name, f"{name} must be a data: URL in base64")
    elif "://" in value[:16]:
        refuse(name, f"{name} is a URL; Pagein fetches nothing: send the file as base64 or a data: URL")
    try:
        return base64.b64decode(value, validate=True)
    except (binascii.Error, ValueError) as error:
        refuse(name, f"{name} is not valid base64: {error}")
