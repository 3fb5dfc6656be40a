"""The clients of scenarios: whole answers, streams that can hang up, and both beside one another."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from common.wire import Address

T = TypeVar("T")
_JSON = {"Content-Type": "application/json"}


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer; status 0 where none came."""

    status: int
    body: bytes
    seconds: float
    headers: dict[str, str] = field(default_factory=dict)

    def told(self) -> str:
        """Status and the beginning of the body, for evidence."""
        text = self.body[:200].decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            text = json.loads(self.body)["error"]["message"][:200]
        return f"{self.status or 'nothing'}: {text}"


def ask(address: Address, path: str, body: Any = None, method: str = "POST", timeout: float = 45.0) -> Answer:
    """One request on a connection of its own."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(*address, timeout=timeout)
    try:
        connection.request(method, path, None if method == "GET" else json.dumps(body or {}), _JSON)
        response = connection.getresponse()
        said = response.read()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Answer(response.status, said, time.monotonic() - began, headers)
    except (OSError, http.client.HTTPException) as error:
        return Answer(0, f"{type(error).__name__} {error}".encode(), time.monotonic() - began)
    finally:
        connection.close()


class Stream:
    """A streaming chat that is read in a thread of its own."""

    def __init__(self, address: Address, body: dict[str, Any], timeout: float) -> None:
        self.status = 0
        self.lines: list[bytes] = []
        self.fault: str | None = None
        self.longest_silence = 0.0
        self.seconds = 0.0
        self.first_token = threading.Event()
        self._connection = http.client.HTTPConnection(*address, timeout=timeout)
        self._body = body | {"stream": True, "stream_options": {"include_usage": True}}
        self._ended = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        began = last = time.monotonic()
        try:
            self._connection.request("POST", "/v1/chat/completions", json.dumps(self._body), _JSON)
            response = self._connection.getresponse()
            self.status = response.status
            while line := response.readline():
                now = time.monotonic()
                self.longest_silence, last = max(self.longest_silence, now - last), now
                if line.strip():
                    self.lines.append(line.strip())
                if b'"content"' in line:
                    self.first_token.set()
        except (OSError, http.client.HTTPException, AttributeError, ValueError) as error:
            self.fault = f"{type(error).__name__} {error}"  # also that the other thread hung up
        self.seconds = time.monotonic() - began
        self._ended.set()
        self.first_token.set()

    def hang_up(self) -> None:
        """Leave, wherever it is."""
        with contextlib.suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    @property
    def ended(self) -> bool:
        """Whether the last byte came, or it broke."""
        return self._ended.is_set()

    def wait(self, seconds: float) -> Stream:
        """Wait for its end, at most so long."""
        self._ended.wait(seconds)
        return self

    def is_whole(self) -> bool:
        """All tokens that were asked for, and a proper end."""
        if not self.ended or not self.lines or self.lines[-1] != b"data: [DONE]":
            return False
        usage = [line for line in self.lines if b'"completion_tokens"' in line]
        return bool(usage) and json.loads(usage[-1][6:])["usage"]["completion_tokens"] == self._body["max_tokens"]

    def has_error_event(self) -> bool:
        """Whether the stream itself says that it broke."""
        return any(b'"error"' in line for line in self.lines)

    def told(self) -> str:
        """How it ended, for evidence."""
        last = self.lines[-1][:160].decode(errors="replace") if self.lines else "nothing"
        return f"{self.status or 'no status'}, {len(self.lines)} lines, last {last}" + (
            f", {self.fault}" if self.fault else ""
        )


class Later(Generic[T]):
    """Something that runs in a thread."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._value: T | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self._value = work()
        except BaseException as error:
            self._error = error

    @property
    def done(self) -> bool:
        """Whether it ended."""
        return not self._thread.is_alive()

    def result(self, within: float = 60.0) -> T:
        """What it gave; raises what it raised, and TimeoutError where it did not end."""
        self._thread.join(within)
        if self._thread.is_alive():
            raise TimeoutError(f"it did not end within {within:g} s")
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[return-value]


def all_of(work: Sequence[Callable[[], T]], within: float = 60.0) -> list[T]:
    """Do everything at once; what each gave."""
    running = [Later(each) for each in work]
    deadline = time.monotonic() + within
    return [each.result(max(0.0, deadline - time.monotonic())) for each in running]
