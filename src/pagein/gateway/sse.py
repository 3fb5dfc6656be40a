"""Server-sent events: framing, and cutting a stream between events."""

from __future__ import annotations

import json

CONTENT_TYPE = "text/event-stream"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""For every event stream: no proxy on the way may keep or hold it back."""
_LONGEST_HELD = 256 * 1024
"""Bytes of an unfinished event that are held back; a longer event passes through in pieces."""


def comment(text: str) -> bytes:
    """One comment, which every client ignores; used as a heartbeat."""
    return f": {' '.join(text.split())}\n\n".encode()


def event(value: object, number: int | None = None) -> bytes:
    """One event with a JSON value, and its id where it has one."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}data: {json.dumps(value, ensure_ascii=False, default=str)}\n\n".encode()


class WholeEvents:
    """Passes a stream on byte by byte, but only up to the end of the last complete event.

    When the worker dies within an event, its torn half is never sent, so the error event that follows can be read.
    """

    def __init__(self) -> None:
        self._held = b""
        self._last = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take bytes in and return those that may be sent."""
        if self._held:
            chunk = self._held + chunk
        end = _end_of_events(chunk)
        if end == 0 and len(chunk) > _LONGEST_HELD:
            end = len(chunk)
        self._held = chunk[end:]
        if end:
            self._last = chunk[:end]
        return chunk[:end]

    def rest(self) -> bytes:
        """Return what is still held back, at the regular end of the stream."""
        rest, self._held = self._held, b""
        self._last += rest
        return rest

    @property
    def finished(self) -> bool:
        """Whether the stream ended as it should: with ``[DONE]`` or with an error of its own."""
        return self._last.rstrip().endswith(b"[DONE]") or b'"error"' in self._last


def _end_of_events(chunk: bytes) -> int:
    if chunk.endswith(b"\n\n"):
        return len(chunk)
    return max(chunk.rfind(mark) + len(mark) if mark in chunk else 0 for mark in (b"\n\n", b"\r\n\r\n", b"\r\r"))
