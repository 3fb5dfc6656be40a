"""How the fake engine sleeps, by vLLM's two paths: as it should, or not; lies beside ``fake_engine.py``."""

from __future__ import annotations

import threading
from http import HTTPStatus

from fake_memory import touch

SLEEP, WAKE = "/sleep", "/wake_up"
WAYS = {"--sleeps": "well", "--sleep-lies": "lies", "--sleep-fails": "fails", "--sleep-hangs": "hangs"}
MEANINGS = {
    "well": "give all of --allocate back",
    "lies": "say so and keep nine tenths of --allocate",
    "fails": "answer 500",
    "hangs": "never answer",
}
KEPT = 0.9


class Bed:
    """The memory of ``--allocate``, and whether the engine sleeps."""

    def __init__(self, size: int, way: str | None) -> None:
        self.way, self.asleep = way, False
        self._size = size
        self._lock = threading.Lock()
        self._memory: bytearray | None = touch(size)

    def has(self, path: str) -> bool:
        """Whether the engine has this path."""
        return self.way is not None and path in (SLEEP, WAKE)

    def tell(self, path: str) -> HTTPStatus:
        """Sleep or wake, in the engine's own way; returns what to answer."""
        if self.way == "hangs":
            threading.Event().wait()
        if self.way == "fails":
            return HTTPStatus.INTERNAL_SERVER_ERROR
        with self._lock:
            self.asleep = path == SLEEP
            self._memory = None  # before more is taken: never twice at once
            kept = KEPT if self.way == "lies" else 0.0
            self._memory = touch(int(self._size * kept) if self.asleep else self._size)
        return HTTPStatus.OK
