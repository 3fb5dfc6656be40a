"""Three calls of the system that Python lacks or wraps too tightly: room for a range, a hole, and writing back."""

from __future__ import annotations

import ctypes
import errno
import os
from contextlib import suppress

_KEEP_SIZE_AND_PUNCH = 0x01 | 0x02
"""FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE, linux/falloc.h."""
_WAIT_WRITE_WAIT = 1 | 2 | 4
"""SYNC_FILE_RANGE_WAIT_BEFORE | _WRITE | _WAIT_AFTER, linux/fs.h."""
_REFUSALS = (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM)
_C = ctypes.CDLL(None, use_errno=True)
_RANGE = (ctypes.c_int64, ctypes.c_int64)


def allocate(fd: int, offset: int, length: int) -> None:
    """Give a range of a file its room on the disk, so that a write into it cannot run out; OSError where it is full.

    A file system that cannot do that is no error: the file then grows as it is written.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(fd, offset, length)
    except OSError as error:
        if error.errno not in _REFUSALS:
            raise


def punch(fd: int, offset: int, length: int) -> bool:
    """Give a range of a file back to the disk; False where the system cannot, and the bytes are still there."""
    if not hasattr(_C, "fallocate"):
        return False
    call = _C.fallocate
    call.argtypes = (ctypes.c_int, ctypes.c_int, *_RANGE)
    return bool(call(fd, _KEEP_SIZE_AND_PUNCH, offset, length) == 0)


def write_back(fd: int, offset: int, length: int) -> None:
    """Write a range of the page cache to the disk and drop it there: written pages count as the writer's memory."""
    if hasattr(_C, "sync_file_range"):
        call = _C.sync_file_range
        call.argtypes = (ctypes.c_int, *_RANGE, ctypes.c_uint)
        call(fd, offset, length, _WAIT_WRITE_WAIT)
    drop(fd, offset, length)


def drop(fd: int, offset: int, length: int) -> None:
    """Take a range of a file out of the page cache."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only an advice
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


def address(view: memoryview) -> int | None:
    """Where a writable buffer lies in memory; None for one that is read only."""
    if view.readonly or not view.nbytes:
        return None
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
