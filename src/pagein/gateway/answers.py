"""What a worker may answer: everything else is a BadAnswer, which says what came instead."""

from __future__ import annotations

import json

from pydantic_core import from_json

from pagein.errors import BadAnswer
from pagein.units import format_bytes

PARSED = 64 * 1024
"""An answer up to this is parsed as a whole (14 µs for an embedding of 384 numbers, 0.1 ms at the bound); of a longer
one the first and the last byte are looked at, since its length was kept."""
LARGEST = 1024**3
"""No answer is longer than this: an engine that never stops sending does not hold its lease for ever."""
EXCERPT = 200
_JSON_TYPES = ("application/json", "application/problem+json")


def is_json_type(content_type: str) -> bool:
    """Whether a Content-Type announces JSON."""
    return content_type.partition(";")[0].strip().lower() in _JSON_TYPES


def read_json(data: bytes) -> object:
    """Parse JSON; raises ValueError. Lone surrogates, which engines send for half an emoji, are let through."""
    try:
        return from_json(data)  # five times as fast as the standard library's, but strict about surrogates
    except ValueError:
        try:
            return json.loads(data)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None


def check_status(model: str, status: int) -> None:
    """Refuse what is neither a success nor an error: redirects, other protocols, invented numbers."""
    if not 200 <= status < 300:
        raise BadAnswer(f"the worker of {model!r} answered with status {status}", model=model, status=status)


def check_json(model: str, body: bytes) -> None:
    """Refuse a complete answer that is no JSON object or list."""
    if len(body) > PARSED:
        check_json_start(model, body)
        check_json_end(model, body)
        return
    try:
        value = read_json(body)
    except ValueError as error:
        raise _no_json(model, body, f"not valid JSON ({error})" if body.strip() else "empty") from None
    if not isinstance(value, dict | list):
        raise _no_json(model, body, "no JSON object")


def check_json_start(model: str, body: bytes) -> None:
    """Refuse the beginning of a long answer that cannot be one of a JSON object or list."""
    if body.lstrip()[:1] not in (b"{", b"["):
        raise _no_json(model, body, "not valid JSON")


def check_json_end(model: str, end: bytes) -> None:
    """Refuse the end of a long answer that cannot be one of a JSON object or list."""
    if end.rstrip()[-1:] not in (b"}", b"]", b""):
        raise _no_json(model, end[-EXCERPT:], "cut off: it ends in the middle of its JSON")


def too_long(model: str) -> BadAnswer:
    """The error of an answer that passes `LARGEST`."""
    return BadAnswer(
        f"the worker of {model!r} sent more than {format_bytes(LARGEST)}, no answer may be longer",
        model=model,
        limit_bytes=LARGEST,
    )


def excerpt(body: bytes) -> str:
    """The beginning of an answer for an error message: one line, printable."""
    text = body[: 4 * EXCERPT].decode("utf-8", "replace")
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= EXCERPT else line[: EXCERPT - 1] + "…"


def _no_json(model: str, body: bytes, what: str) -> BadAnswer:
    began = f": {excerpt(body)}" if body.strip() else ""
    return BadAnswer(f"the answer of the worker of {model!r} is {what}{began}", model=model)
