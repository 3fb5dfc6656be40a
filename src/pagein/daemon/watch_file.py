"""Notices that a file was changed (``pagein serve --watch``), by looking at it: works on every file system.

Editors write a new file and move it over the old one, so it is the name that is watched, not an open file. Two equal
looks in a row end a change: what is still being written is not read, and of several changes at once only one is told.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

SECONDS = 1.0
"""Pause between two looks; a look costs one system call."""


@dataclass(frozen=True, slots=True)
class Look:
    """What tells one state of a file from another."""

    modified: int
    """Nanoseconds."""
    size: int
    inode: int
    device: int


def look(path: Path) -> Look | None:
    """Return the file's state, following links; None where there is none, or it cannot be seen now."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return Look(found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev)


async def changes(
    path: Path,
    *,
    pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
    look: Callable[[Path], Look | None] = look,
) -> AsyncIterator[None]:
    """Yield once for each change of a file since the first look, when it has settled.

    A file that vanishes is no change; one that comes back otherwise than it was is. Looks run in a thread, since a file
    of a network may hang. Ends only with its task. ``pause`` and ``look`` let tests do without clock and disk.
    """
    told = last = await asyncio.to_thread(look, path)
    while True:
        await pause(SECONDS)
        seen = await asyncio.to_thread(look, path)
        settled, last = seen == last, seen
        if settled and seen is not None and seen != told:
            told = seen
            yield
