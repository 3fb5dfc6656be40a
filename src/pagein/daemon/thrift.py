"""Keeps the daemon's own memory small, since it is part of the budget (glibc only; elsewhere nothing happens).

glibc gives each thread an arena of its own and keeps what is freed: a daemon that reads the disk and ``/proc`` in
threads grows by megabytes that nobody uses.
"""

from __future__ import annotations

import asyncio
import ctypes

_ARENA_MAX = -8  # M_ARENA_MAX, malloc.h
ARENAS = 2
EVERY = 60.0
"""Seconds between two times that free memory is given back."""


def few_arenas() -> bool:
    """Let all threads share `ARENAS` arenas; to be called before the first thread starts. True where that worked."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt is not None and mallopt(_ARENA_MAX, ARENAS) == 1)


async def give_back_for_ever() -> None:
    """Give what was freed back to the system, again and again; takes about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while trim is not None:
        await asyncio.sleep(EVERY)
        trim(0)
