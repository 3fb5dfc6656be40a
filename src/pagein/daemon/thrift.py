"""Keeps the daemon's own memory small and even, since it is part of the budget.

glibc gives each thread an arena of its own and keeps what is freed: a daemon that reads the disk and ``/proc`` in
threads grows by megabytes that nobody uses (elsewhere nothing is done about that). Python's objects that refer to each
other, such as an error with its frames, and the request in them, stay until they are searched for: by default after
tens of thousands of others, since a search looks at everything that was ever imported.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc

_ARENA_MAX = -8  # M_ARENA_MAX, malloc.h
ARENAS = 2
EVERY = 10.0
"""Seconds between two times that free memory is given back."""


def few_arenas() -> bool:
    """Let all threads share `ARENAS` arenas; to be called before the first thread starts. True where that worked."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return bool(mallopt is not None and mallopt(_ARENA_MAX, ARENAS) == 1)


def set_aside() -> None:
    """Search no more through what is there now, which stays; to be called once, at the end of the start."""
    gc.collect()
    gc.freeze()


async def give_back_for_ever() -> None:
    """Free what refers only to itself, give what is free back to the system, again and again; about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    while True:
        await asyncio.sleep(EVERY)
        gc.collect()
        if trim is not None:
            trim(0)
