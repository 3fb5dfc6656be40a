"""Take members out of a JSON object without touching another byte of it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def without(body: bytes, names: Collection[str]) -> bytes:
    """Return a body, which must be one valid JSON object, without its members of these names, in its own encoding."""
    if not names:
        return body
    encoding = json.detect_encoding(body)  # as `json.loads` reads it
    text = body.decode(encoding, "surrogatepass")
    members = list(_members(text))
    if not members:
        return body
    pieces: list[str] = []
    before = members[0][1]
    for name, start, end in members:
        if name not in names:
            pieces.append(text[before if pieces else start : end])  # with the comma before it, but for the first one
        before = end
    return "".join((text[: members[0][1]], *pieces, text[before:])).encode(encoding, "surrogatepass")


def _members(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the name of each member, where it starts and where its value ends."""
    at = _past_space(text, text.index("{") + 1)
    while text[at] != "}":
        start = at
        name, end = _DECODER.raw_decode(text, at)
        colon = _past_space(text, end)
        _, end = _DECODER.raw_decode(text, _past_space(text, colon + 1))
        yield name, start, end
        at = _past_space(text, end)
        if text[at] == ",":
            at = _past_space(text, at + 1)


def _past_space(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
