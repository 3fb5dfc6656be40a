"""What a fake engine answers instead of an answer, by the word of ``--garbage``; lies beside ``fake_engine.py``.

Each writes bytes to the connection by hand and then ends it, unless it says that it goes on for ever.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

GOOD = json.dumps({"object": "chat.completion", "choices": [{"index": 0, "message": {"content": "stale"}}]}).encode()
EVENT = b'data: {"object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": "word0"}}]}\n\n'


def whole(body: bytes, kind: str = "application/json", status: str = "200 OK", length: int | None = None) -> bytes:
    """One answer, with the length it announces."""
    count = len(body) if length is None else length
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {count}\r\n\r\n"
    return head.encode() + body


def events(*pieces: bytes, end: bool = True) -> bytes:
    """A stream of events in chunks."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + (b"0\r\n\r\n" if end else b"")


HTML = b"<html><body>It works! \x1b[31mred\x00</body></html>"
FIXED: dict[str, bytes] = {
    # no JSON, or half of it, where JSON is due
    "text": whole(b"\x00\xff nonsense"),
    "half-json": whole(b'{"object": "chat.completion", "cho'),
    "html": whole(HTML, "text/html"),
    "null": whole(b"null"),
    "empty": whole(b""),
    "no-content": b"HTTP/1.1 204 No Content\r\n\r\n",
    # no stream, or a broken one, where events are due
    "bad-sse": events(b"data: {not json\n\nevent: what\ndata: [1, 2\n\n"),
    "bad-event": events(EVENT, b"data: {not json\n\n", b"data: [DONE]\n\n"),
    "no-done": events(EVENT),
    "false-done": events(EVENT, b'data: {"choices": [{"delta": {"content": "data: [DONE]"}}]}\n\n'),
    "torn-event": events(EVENT, b'data: {"choices": [{"del', end=False),
    "bad-chunk": events(EVENT, end=False) + b"not-a-length\r\nxyz\r\n",
    "json-stream": whole(GOOD),
    # the wrong frame
    "close": b"",
    "not-http": b"SSH-2.0-OpenSSH_9.9\r\n",
    "half-head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "length-too-long": whole(GOOD, length=len(GOOD) + 100),
    "length-too-short": whole(GOOD, length=len(GOOD) - 10),
    "length-nonsense": b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n{}",
    "two-lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 9\r\n\r\n{}",
    "long-header": b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 100_000 + b"\r\n\r\n",
    "bad-gzip": whole(b"no gzip", "application/json\r\nContent-Encoding: gzip"),
    # the wrong status
    "redirect": whole(b"", status="307 Temporary Redirect\r\nLocation: http://127.0.0.1:1/"),
    "switch": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: chess\r\nConnection: upgrade\r\n\r\ne4",
    "odd-status": whole(b"{}", status="999 Whatever"),
    "error-page": whole(HTML, "text/html", "500 Internal Server Error"),
    "bad-request-page": whole(b"\xff\xfe no", "text/html", "400 Bad Request"),
}


def huge(write: Callable[[bytes], Any]) -> None:
    """An answer of blanks, for ever."""
    write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        write(b"10000\r\n" + b" " * 65536 + b"\r\n")


def huge_json(write: Callable[[bytes], Any]) -> None:
    """JSON that never ends."""
    write(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{"\r\n')
    while True:
        write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def endless_event(write: Callable[[bytes], Any]) -> None:
    """A stream whose second event never ends."""
    write(events(EVENT, b"data: ", end=False))
    while True:
        write(b"10000\r\n" + b"x" * 65536 + b"\r\n")


def endless_head(write: Callable[[bytes], Any]) -> None:
    """Header lines for ever, as fast as they are taken."""
    write(b"HTTP/1.1 200 OK\r\n")
    while True:
        write(b"X-More: of the same\r\n" * 100)


def endless_continue(write: Callable[[bytes], Any]) -> None:
    """Interim answers for ever."""
    while True:
        write(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def slow_head(write: Callable[[bytes], Any]) -> None:
    """Half a head, and then nothing."""
    write(b"HTTP/1.1 200 OK\r\nContent-")
    threading.Event().wait()


def slow_body(write: Callable[[bytes], Any]) -> None:
    """Half a body, and then nothing."""
    write(whole(GOOD)[:-10])
    threading.Event().wait()


def slow_stream(write: Callable[[bytes], Any]) -> None:
    """One event, and then nothing."""
    write(events(EVENT, end=False))
    threading.Event().wait()


ENDLESS: dict[str, Callable[[Callable[[bytes], Any]], None]] = {
    "huge": huge,
    "huge-json": huge_json,
    "endless-event": endless_event,
    "endless-head": endless_head,
    "endless-continue": endless_continue,
    "slow-head": slow_head,
    "slow-body": slow_body,
    "slow-stream": slow_stream,
}
KEPT = ("second-answer",)
"""After these the connection stays open, and takes the next request."""
CHOICES = (*FIXED, *ENDLESS, *KEPT)


def answer(kind: str, write: Callable[[bytes], Any]) -> None:
    """Answer nonsense of a kind; the caller ends the connection afterwards, unless the kind is `KEPT`."""
    if kind in ENDLESS:
        ENDLESS[kind](write)
    elif kind == "second-answer":
        write(whole(b'{"object": "chat.completion", "choices": []}') + whole(GOOD))  # that for a request nobody sent
    else:
        write(FIXED[kind])
