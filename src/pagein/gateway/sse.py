"""Server-sent events: framing, cutting a stream between events, and looking at what passes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from pagein.gateway.answers import excerpt, read_json
from pagein.units import format_bytes

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""For every event stream: no proxy on the way may keep or hold it back."""
LONGEST_EVENT = 1024 * 1024
"""Bytes of an event that are held back until it is whole; a longer one is a fault."""
END = b"[DONE]"
"""The data of the last event of a chat."""
_MARKS = (b"\n\n", b"\n\r\n", b"\r\r")
_MARK = re.compile(rb"\n\n|\n\r\n|\r\r")
_SEAM = 2
"""Bytes of a mark that may have come before its last one."""


def comment(text: str) -> bytes:
    """One comment, which every client ignores; used as a heartbeat."""
    return f": {' '.join(text.split())}\n\n".encode()


def event(value: object, number: int | None = None, name: str | None = None) -> bytes:
    """One event with a JSON value, and its id and its name where it has them."""
    head = "" if number is None else f"id: {number}\n"
    head += "" if name is None else f"event: {name}\n"
    return head.encode() + b"data: " + to_json(value) + b"\n\n"


def to_json(value: object) -> bytes:
    """A value as JSON; half an emoji, which engines send, as its escape."""
    return json.dumps(value, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")


def split(whole: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each of some complete events as it stands, with its data (empty: a comment)."""
    start = 0
    for mark in _MARK.finditer(whole):
        yield whole[start : mark.end()], _data_of(whole[start : mark.start()])
        start = mark.end()


class WholeEvents:
    """Passes a stream on byte by byte, but only up to the end of the last complete event.

    When the worker dies within an event, its torn half is never sent, so the error event that follows can be read.
    Where the events are those of a chat, each must be a JSON object or ``[DONE]``, and nothing passes after that.
    """

    def __init__(self, *, checked: bool = True) -> None:
        self._held = bytearray()
        self._checked = checked
        self.fault: str | None = None
        """What is wrong with the stream; nothing passes from there on."""
        self.done = False
        """The end mark passed."""
        self.failed = False
        """The worker sent an error event of its own."""

    @property
    def finished(self) -> bool:
        """Whether the stream ended as it should: with ``[DONE]`` or with an error of its own."""
        return self.done or self.failed

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes in and return those that may be sent."""
        if self.done or self.fault is not None:
            return b""
        seam = max(len(self._held) - _SEAM, 0)
        self._held += chunk
        end = max((at + len(mark) for mark in _MARKS if (at := self._held.rfind(mark, seam)) >= 0), default=0)
        whole = bytes(self._held[:end])
        del self._held[:end]
        if len(self._held) > LONGEST_EVENT:
            self.fault = f"an event of more than {format_bytes(LONGEST_EVENT)}"
        return self._look_at(whole) if self._checked else whole

    def rest(self) -> bytes:
        """Return what is still held back, at the regular end of the stream; where events are checked, as an event."""
        rest = bytes(self._held) if not self.done and self.fault is None else b""
        self._held.clear()
        if not self._checked or not rest.strip():
            return rest
        return self._look_at(rest.rstrip(b"\r\n") + b"\n\n")

    def _look_at(self, whole: bytes) -> bytes:
        start = 0
        for mark in _MARK.finditer(whole):
            if (fault := self._fault_of(whole[start : mark.start()])) is not None:
                self.fault = fault
                return whole[:start]
            start = mark.end()
            if self.done:
                return whole[:start]
        return whole

    def _fault_of(self, text: bytes) -> str | None:
        data = _data_of(text)
        if not data:
            return None
        if data == END:
            self.done = True
            return None
        try:
            value = read_json(data)
        except ValueError:
            return f"an event that is not valid JSON: {excerpt(data)}"
        if not isinstance(value, dict):
            return f"an event that is no JSON object: {excerpt(data)}"
        self.failed = self.failed or bool(value.get("error"))
        return None


def _data_of(text: bytes) -> bytes:
    if text.startswith(b"data:") and b"\n" not in text and b"\r" not in text:  # nearly every event
        return text[5:].strip()
    return b"\n".join(line[5:].strip() for line in text.splitlines() if line.startswith(b"data:")).strip()
