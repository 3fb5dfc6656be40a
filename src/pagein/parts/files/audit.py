"""Who had which part loaded, or was refused it: one line of JSON each, in a file of bounded size."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

LIMIT = 8 * 1024**2
"""Bytes of the file; then it becomes ``….1`` and the one before is removed."""
LONGEST = 200
"""Characters of a text of a line: what a caller sends must not fill the file."""
LOADED = "loaded"
"""The result of a load that succeeded; else it is the code of an error."""


@dataclass(frozen=True, slots=True)
class AuditLine:
    """One load as it ended. Never holds keys, prompts or answers."""

    who: str
    """The caller as the server knows it: a tenant, a client's address, ``warm-up``."""
    task: str | None
    part: str
    precision: str
    result: str
    file: str | None = None
    digest: str | None = None
    """The sha256 of the plan's entry, or of what was found in its place."""
    bytes: int | None = None
    """Bytes that were read."""
    ms: float | None = None
    reason: str | None = None


Audit = Callable[[AuditLine], None]
"""Takes a line; must not raise."""


def no_audit(line: AuditLine) -> None:
    """Keep no record: for tools that check files and load nothing."""


class AuditLog:
    """Appends lines to a file that only its owner can read; any thread may call it.

    A line that cannot be written is counted in ``lost`` and does not stop the load: a full disk must not stop a server.
    """

    def __init__(self, path: Path, limit: int = LIMIT, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self.lost = 0
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()

    def __call__(self, line: AuditLine) -> None:
        """Append a line; blocks for one write."""
        data = self._encode(line)
        with self._lock:
            try:
                self._append(data)
            except OSError:
                self.lost += 1

    def _encode(self, line: AuditLine) -> bytes:
        # Everything is cut, and JSON escapes line ends, so that no caller can forge a second line.
        body = {key: value[:LONGEST] if isinstance(value, str) else value for key, value in asdict(line).items()}
        return json.dumps({"time": round(self._clock(), 3), **body}).encode() + b"\n"

    def _append(self, data: bytes) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self.path, flags, 0o600)
        try:
            if os.fstat(descriptor).st_size + len(data) > self._limit:
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
                os.close(descriptor)
                descriptor = os.open(self.path, flags | os.O_EXCL, 0o600)
            if os.write(descriptor, data) < len(data):
                self.lost += 1
        finally:
            os.close(descriptor)
