"""Looks for idle parts every few seconds, also while nobody calls."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagein.parts.runtime import Parts


class Sweeper:
    """A thread that ends with `close`, or with the model."""

    def __init__(self, parts: Parts, seconds: float) -> None:
        self._ended = threading.Event()
        target = weakref.ref(parts, lambda _: self._ended.set())
        threading.Thread(target=_run, args=(target, self._ended, seconds), name="pagein-parts", daemon=True).start()

    def close(self) -> None:
        """End it soon. Idempotent."""
        self._ended.set()


def _run(target: weakref.ref[Parts], ended: threading.Event, seconds: float) -> None:
    while not ended.wait(seconds):
        parts = target()
        if parts is None:
            return
        parts.sweep()
        del parts
