"""What happened to the parts of one model of late, for whoever looks in now and then: the last of it, in order."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

KEPT = 256
"""Events; older ones are forgotten."""


class PartEventKind(StrEnum):
    """What happened to a part."""

    LOAD = "load"
    """It came in."""
    EVICT = "evict"
    """It left; the reason says for what."""
    REFUSE = "refuse"
    """A call could not have it."""
    REPLACE = "replace"
    """Another part stands in its place from now on, or it does itself again."""
    PIN = "pin"
    UNPIN = "unpin"


@dataclass(frozen=True, slots=True)
class PartEvent:
    """One thing that happened. Never holds prompts or answers."""

    seq: int
    """Counted up from 1 in each process."""
    time: float
    """Seconds since the epoch."""
    kind: PartEventKind
    part: str
    task: str | None = None
    """Whose call it was for."""
    bytes: int | None = None
    """That it has taken, or given back."""
    seconds: float | None = None
    """What the load took."""
    reason: str | None = None


class PartEvents:
    """The last events; any thread may call it, also with locks of its own."""

    def __init__(self, kept: int = KEPT, clock: Callable[[], float] = time.time) -> None:
        self._events: deque[PartEvent] = deque(maxlen=kept)
        self._lock = threading.Lock()
        self._clock = clock
        self._seq = 0

    def add(
        self,
        kind: PartEventKind,
        part: str,
        *,
        task: str | None = None,
        nbytes: int | None = None,
        seconds: float | None = None,
        reason: str | None = None,
    ) -> None:
        """Note what has just happened."""
        now = round(self._clock(), 3)
        with self._lock:
            self._seq += 1
            self._events.append(PartEvent(self._seq, now, kind, part, task, nbytes, seconds, reason))

    def after(self, seq: int) -> list[PartEvent]:
        """Return the events since that number, the oldest first."""
        with self._lock:
            return [one for one in self._events if one.seq > seq]
