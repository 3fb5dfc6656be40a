"""One process at a time: a lock on a file of the folder, which ends with the process however it ends."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from pagein.errors import StoreInUse

_NAME = "lock"


def lock(folder: Path) -> int:
    """Take the lock and return the descriptor that keeps it; StoreInUse where another process has it."""
    fd = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreInUse(folder, _holder(fd)) from None
        with suppress(OSError):  # only for who asks; a full disk is no reason not to read
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _holder(fd: int) -> int | None:
    with suppress(OSError, ValueError):
        return int(os.pread(fd, 20, 0))
    return None
