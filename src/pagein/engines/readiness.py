"""Waits until a server is healthy, and makes sure that it is ours that answers."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from pagein.engines import listening
from pagein.errors import LoadFailed
from pagein.protocol import Endpoint
from pagein.units import format_duration

_SHORTEST_PAUSE = 0.005
_LONGEST_PAUSE = 0.25
_PAUSE_SHARE = 0.03  # of the time waited so far: readiness is seen at most 3 % late, and a long load is left in peace
_PROBE_TIMEOUT = 2.0
_EARLIER = 2.0
"""Seconds, at most a tenth of the bound, by which the wait ends before the daemon's own: it knows more to tell."""
_LARGEST_ANSWER = 1024 * 1024
_NOT_FOUND = (404, 405, 501)


class ForeignListener(LoadFailed):
    """Another program answers on the port that was meant for this server."""


@dataclass(frozen=True, slots=True)
class Health:
    """What asking for health means for one server."""

    paths: tuple[str, ...]
    """Tried in this order; the next one only where a server does not know the one before."""
    verify_listener: bool = True
    """Talk to a port only when this worker's own process tree listens there."""


def await_healthy(ended: Callable[[], str | None], endpoint: Endpoint, health: Health, timeout: float) -> None:
    """Block until the server answers its health path with success; ``ended`` tells why it ended, or None.

    Raises LoadFailed when the server ends or stays unhealthy for ``timeout`` seconds, ForeignListener when another
    program answers on the port. A socket needs no such check: it lies in a folder that only this worker writes.
    """
    began = time.monotonic()
    deadline = began + timeout - min(_EARLIER, timeout / 10)
    telling = _Answer(health.paths[0], accepted=False)
    while True:
        answer = _ask(endpoint, health.paths, deadline)
        telling = max(answer, telling, key=_Answer.says)  # the newest of those that say most
        if answer.accepted and health.verify_listener and _is_foreign(endpoint):
            raise ForeignListener(f"another program listens on port {endpoint.port}", port=endpoint.port)
        if answer.status is not None and 200 <= answer.status < 300:
            return
        if (why := ended()) is not None:
            raise LoadFailed(f"{why} before it was ready")
        if time.monotonic() >= deadline:
            raise LoadFailed(f"not ready within {format_duration(timeout)}: {telling.told()}")
        waited = time.monotonic() - began
        time.sleep(min(max(_SHORTEST_PAUSE, waited * _PAUSE_SHARE), _LONGEST_PAUSE))


def get(endpoint: Endpoint, path: str, timeout: float = _PROBE_TIMEOUT) -> tuple[int, bytes] | None:
    """Ask one HTTP GET and return status and body, or None when nobody gives a readable answer in time."""
    answer = _get(endpoint, path, time.monotonic() + timeout)
    return (answer.status, answer.body) if answer.status is not None else None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What came back from one GET."""

    path: str
    accepted: bool
    """Somebody took the connection."""
    came: bytes = b""
    status: int | None = None
    """None where what came is no HTTP."""
    body: bytes = b""

    def says(self) -> int:
        """How much of a reason it is."""
        return self.accepted + bool(self.came) + (self.status is not None)

    def told(self) -> str:
        """The answer as the reason why a server is not ready."""
        if self.status is not None:
            return f"its health path {self.path} answered {self.status}"
        if self.came:
            return f"its health path {self.path} answered something that is no HTTP: {self.came[:40]!r}"
        return f"its health path {self.path} does not answer" if self.accepted else "it does not listen"


def _get(endpoint: Endpoint, path: str, deadline: float) -> _Answer:
    request = f"GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    came, accepted = bytearray(), False
    with contextlib.suppress(OSError), _connect(endpoint, _left(deadline)) as connection:
        accepted = True
        connection.sendall(request)
        while not _is_whole(came) and time.monotonic() < deadline:
            connection.settimeout(_left(deadline))
            if not (chunk := connection.recv(65536)):
                break
            came += chunk
    head, _, body = bytes(came).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1][:3].isdigit():
        return _Answer(path, accepted, bytes(came))
    return _Answer(path, accepted, bytes(came), int(words[1][:3]), body)


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _is_whole(answer: bytearray) -> bool:
    """Whether all of an answer has come, also where the server leaves the connection open."""
    if len(answer) >= _LARGEST_ANSWER:
        return True
    head, end, body = bytes(answer).partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE) if end else None
    return length is not None and len(body) >= int(length[1])


def _ask(endpoint: Endpoint, paths: tuple[str, ...], deadline: float) -> _Answer:
    answer = _Answer(paths[0], accepted=False)
    for path in paths:
        answer = _get(endpoint, path, min(time.monotonic() + _PROBE_TIMEOUT, deadline))
        if answer.status not in _NOT_FOUND:
            break
    return answer


def _is_foreign(endpoint: Endpoint) -> bool:
    """Whether another program listens on the port, also a silent one; not where ours answered and has just ended."""
    if endpoint.port is None or listening.tree_listens(os.getpid(), endpoint.port):
        return False
    with contextlib.suppress(OSError), _connect(endpoint, _PROBE_TIMEOUT):
        return not listening.tree_listens(os.getpid(), endpoint.port)
    return False


def _connect(endpoint: Endpoint, timeout: float) -> socket.socket:
    if endpoint.socket is not None:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(timeout)
        try:
            connection.connect(endpoint.socket)
        except OSError:
            connection.close()
            raise
        return connection
    assert endpoint.host is not None
    assert endpoint.port is not None
    return socket.create_connection((endpoint.host, endpoint.port), timeout)
