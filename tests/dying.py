"""A process that ends itself without a trace, at any chosen moment of what it does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable


def die_at(moment: int, calls: Iterable[str]) -> Callable:
    """Count system calls, by their names in `os`, and end before or after the chosen one; returns what counts more."""
    seen = 0

    def tick() -> None:
        nonlocal seen
        if seen == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def wrap(call: Callable) -> Callable:
        def counted(*args, **kwargs):
            tick()
            result = call(*args, **kwargs)
            tick()
            return result

        return counted

    for name in calls:
        setattr(os, name, wrap(getattr(os, name)))
    return wrap
