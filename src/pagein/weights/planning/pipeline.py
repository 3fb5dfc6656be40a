"""How long a pass takes whose reads run beside its computing: the ring of buffers, on paper."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

_PASSES = 3
"""The first ones begin with empty buffers; the last is as all that follow."""


class Step(NamedTuple):
    """One part of the model as a pass meets it."""

    read: float
    """Seconds that its read takes alone; 0 where it is resident."""
    compute: float
    """Seconds that it computes."""
    streams: bool


def pass_seconds(steps: Sequence[Step], slots: int) -> float:
    """Return the seconds of one pass among many: at least all reads, at least all computing, more where they wait.

    Reads follow one another. One begins when a buffer is free, that is when the unit so many buffers before has been
    computed, and across the end of a pass. So what streams in a row beside what is resident in a row costs nearly the
    sum of both, and what streams at even distances the larger.
    """
    now = read = began = 0.0
    released = deque([0.0] * slots, maxlen=slots)
    for _ in range(_PASSES):
        began = now
        for step in steps:
            if step.streams:
                read = max(read, released[0]) + step.read
                now = max(now, read) + step.compute
                released.append(now)
            else:
                now += step.compute
    return max(now - began, sum(step.read for step in steps))
