"""A small HTTP client on raw sockets with keep-alive: the same few microseconds of its own in every arm."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

Address = tuple[str, int]
TIMEOUT = 120.0
"""Seconds without a byte after which a benchmark gives up."""


class BenchmarkError(Exception):
    """A benchmark cannot go on; the message says why."""


class Dropped(BenchmarkError):
    """A connection ended before anything of an answer came."""


@dataclass(frozen=True, slots=True)
class Target:
    """One request, ready to be sent, and where to."""

    address: Address
    request: bytes


def post(address: Address, path: str, body: dict[str, Any]) -> Target:
    """A POST of JSON over a kept connection."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
    return Target(address, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def get(address: Address, path: str) -> Target:
    """A GET over a kept connection."""
    return Target(address, f"GET {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n\r\n".encode())


class Answer:
    """One answer as it comes in: of known length, or in chunks."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._body_at = -1
        self._length: int | None = None
        self.headers: dict[str, str] = {}
        self.status = 0
        self.done = False

    def feed(self, chunk: bytes) -> None:
        """Take bytes in; ``done`` once the answer is whole. Raises Dropped where the connection ends before."""
        if not chunk:
            if self._data:
                raise BenchmarkError(f"the connection ended within an answer: {bytes(self._data[-300:])!r}")
            raise Dropped("the connection ended before an answer")
        self._data += chunk
        if self._body_at < 0:
            end = self._data.find(b"\r\n\r\n")
            if end < 0:
                return
            self._read_head(bytes(self._data[:end]).decode("latin-1"))
            self._body_at = end + 4
        if self._length is None:
            self.done = self._data.endswith(b"0\r\n\r\n") and (
                len(self._data) == self._body_at + 5 or self._data.endswith(b"\r\n0\r\n\r\n")
            )
        else:
            self.done = len(self._data) - self._body_at >= self._length

    def _read_head(self, head: str) -> None:
        first, *lines = head.split("\r\n")
        self.status = int(first.split(" ", 2)[1])
        self.headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines)}
        if "content-length" in self.headers:
            self._length = int(self.headers["content-length"])
        elif "chunked" not in self.headers.get("transfer-encoding", ""):
            raise BenchmarkError(f"an answer of unknown length: {head}")

    @property
    def body_began(self) -> bool:
        """Whether a byte of the body came, behind the headers."""
        return 0 <= self._body_at < len(self._data)

    @property
    def closes(self) -> bool:
        """The server closes the connection behind this answer."""
        return self.headers.get("connection", "").lower() == "close"

    @property
    def body(self) -> bytes:
        """The body so far."""
        raw = bytes(self._data[self._body_at :])
        return raw if self._length is not None else b"".join(_chunks(raw))

    def check(self) -> None:
        """Raise BenchmarkError unless it is a success."""
        if self.status != 200:
            raise BenchmarkError(f"answered {self.status}: {self.body[:500]!r}")


def _chunks(raw: bytes) -> Iterator[bytes]:
    while (end := raw.find(b"\r\n")) > 0:
        size = int(raw[:end].partition(b";")[0], 16)
        yield raw[end + 2 : end + 2 + size]
        raw = raw[end + 2 + size + 2 :]


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer, in seconds from the first byte sent."""

    first: float
    """To the first byte of the answer's body."""
    whole: float
    answer: Answer


class Connection:
    """One kept connection; asks one request after the other."""

    def __init__(self, address: Address, timeout: float = TIMEOUT) -> None:
        self.address, self._timeout = address, timeout
        self.opened = 0
        self._socket: socket.socket | None = None

    def ask(self, request: bytes) -> Exchange:
        """Send a request and read the whole answer; a connection that must be made anew is made before the clock."""
        reused = self._socket is not None
        try:
            return self._ask(self._open(), request)
        except Dropped:
            self.close()
            if not reused:
                raise
            return self._ask(self._open(), request)  # the server closed it in the moment it was used again

    def _ask(self, connection: socket.socket, request: bytes) -> Exchange:
        answer, first = Answer(), None
        began = time.perf_counter()
        try:
            connection.sendall(request)
            while not answer.done:
                chunk = connection.recv(262144)
                now = time.perf_counter()
                answer.feed(chunk)
                if first is None and answer.body_began:
                    first = now
        except ConnectionError as error:
            raise Dropped(f"{self.address} dropped the connection: {error}") from error
        answer.check()
        if answer.closes:
            self.close()
        return Exchange((first or now) - began, now - began, answer)

    def _open(self) -> socket.socket:
        if self._socket is None or _is_closed(self._socket):
            self.close()
            self._socket = connect(self.address)
            self.opened += 1
        self._socket.settimeout(self._timeout)
        return self._socket

    def close(self) -> None:
        """Close; `ask` opens anew."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def connect(address: Address) -> socket.socket:
    """A new connection that sends at once."""
    connection = socket.create_connection(address, TIMEOUT)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _is_closed(connection: socket.socket) -> bool:
    """Whether the server closed an idle connection."""
    connection.setblocking(False)
    try:
        return connection.recv(1, socket.MSG_PEEK) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(TIMEOUT)
