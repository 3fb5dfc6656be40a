"""Waits until a server is healthy, and makes sure that it is ours that answers."""

from __future__ import annotations

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
    """Accept an answer on a port only when this worker's own process tree listens there."""


def await_healthy(ended: Callable[[], str | None], endpoint: Endpoint, health: Health, timeout: float) -> None:
    """Block until the server answers its health path with success; ``ended`` tells why it ended, or None.

    Raises LoadFailed when the server ends or stays unhealthy for ``timeout`` seconds, ForeignListener when another
    program answers on the port. A socket needs no such check: it lies in a folder that only this worker writes.
    """
    began = time.monotonic()
    deadline = began + timeout
    last: str | None = None
    while True:
        status = _ask(endpoint, health.paths)
        if status is not None:
            last = f"its health path answered {status}"
            if health.verify_listener and not _is_ours(endpoint):
                raise ForeignListener(f"another program listens on port {endpoint.port}", port=endpoint.port)
            if 200 <= status < 300:
                return
        if (why := ended()) is not None:
            raise LoadFailed(f"{why} before it was ready")
        if time.monotonic() >= deadline:
            raise LoadFailed(f"not ready within {format_duration(timeout)}: {last or 'it does not answer'}")
        waited = time.monotonic() - began
        time.sleep(min(max(_SHORTEST_PAUSE, waited * _PAUSE_SHARE), _LONGEST_PAUSE))


def get(endpoint: Endpoint, path: str, timeout: float = _PROBE_TIMEOUT) -> tuple[int, bytes] | None:
    """Ask one HTTP GET and return status and body, or None when nobody gives a readable answer in time."""
    request = f"GET {path} HTTP/1.0\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
    answer = bytearray()
    deadline = time.monotonic() + timeout
    try:
        with _connect(endpoint, timeout) as connection:
            connection.sendall(request)
            while not _is_whole(answer) and (chunk := connection.recv(65536)):
                answer += chunk
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
    except OSError:
        if not answer:
            return None
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) < 2 or not words[0].startswith(b"HTTP/") or not words[1][:3].isdigit():
        return None
    return int(words[1][:3]), body


def _is_whole(answer: bytearray) -> bool:
    """Whether all of an answer has come, also where the server leaves the connection open."""
    if len(answer) >= _LARGEST_ANSWER:
        return True
    head, end, body = bytes(answer).partition(b"\r\n\r\n")
    length = re.search(rb"\r\ncontent-length:\s*(\d+)", head, re.IGNORECASE) if end else None
    return length is not None and len(body) >= int(length[1])


def _ask(endpoint: Endpoint, paths: tuple[str, ...]) -> int | None:
    status = None
    for path in paths:
        answer = get(endpoint, path)
        if answer is None:
            return status
        status = answer[0]
        if status not in _NOT_FOUND:
            break
    return status


def _is_ours(endpoint: Endpoint) -> bool:
    return endpoint.port is None or listening.tree_listens(os.getpid(), endpoint.port)


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
