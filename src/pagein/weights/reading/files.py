"""A weight file under reading: opened once, past the page cache where it allows that, checked after every read."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from threading import Lock

from pagein.errors import WeightsUnreadable

PAGE = 4096
"""Bytes; what direct reads want offsets, lengths and addresses to be multiples of."""
_FOLIO = 2 * 1024 * 1024
"""Bytes of the largest piece in which Linux caches a file."""
_READ_AHEAD = 32 * 1024 * 1024
"""Bytes that the kernel may have read past what was asked for: twice the largest usual setting, as advised."""


Stamp = tuple[int, int, int]
"""What tells a file's contents from others: its size, the time of its last write, its inode."""


def stamp_of(file: Path | int) -> Stamp:
    """Return the stamp of a path or of an open file."""
    status = os.stat(file)
    return status.st_size, status.st_mtime_ns, status.st_ino


class ReadMode(StrEnum):
    """How bytes come from a disk into a buffer."""

    DIRECT = "direct"
    """Straight into the buffer (O_DIRECT; F_NOCACHE on macOS): no page cache, no copy."""
    BUFFERED = "buffered"
    """Through the page cache, from which the bytes are dropped again once they were copied."""


class WeightFile:
    """One open file, read by one thread, or by several within ``spread`` bytes of each other."""

    def __init__(self, path: Path, mode: ReadMode, spread: int = 0, stamp: Stamp | None = None) -> None:
        """``stamp`` is that of the file whose header was read: raises WeightsUnreadable where this is another."""
        self.path = path
        # The path may be a link of the hub's cache, which whoever read the header has checked; no other is followed.
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._fd = os.open(os.path.realpath(path), flags)
        except OSError as error:
            raise WeightsUnreadable(path, f"cannot be opened: {error.strerror}") from error
        self._open = Lock()  # held where the file might be closed meanwhile
        self._stamp = stamp_of(self._fd)
        self.size = self._stamp[0]
        if stamp is not None and stamp != self._stamp:
            os.close(self._fd)
            raise WeightsUnreadable(path, f"was replaced since its header was read: {stamp[0]} bytes, now {self.size}")
        self.direct = mode is ReadMode.DIRECT and self._set_direct()
        """Whether reads go past the page cache: False also where the file system refused."""
        self._spread, self._end = spread, 0
        if not self.direct and hasattr(os, "posix_fadvise"):
            # Read-ahead makes large folios of the cache. Without it (RANDOM) the same bytes cost four times the CPU.
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, into: memoryview, offset: int, needed: int) -> int:
        """Fill the view from a byte of the file on, and return the count that came: less only at the file's end.

        Blocks without the GIL. Raises WeightsUnreadable where fewer than ``needed`` bytes came.
        """
        if not self.direct and abs(offset - self._end) > self._spread:
            self._drop_around_end()
        try:
            got = self._fill(into, offset)
        except OSError as error:
            raise WeightsUnreadable(self.path, error.strerror or str(error), offset, len(into), 0) from error
        if got < max(needed, min(len(into), self.size - offset)):
            self.check()
            raise WeightsUnreadable(self.path, f"the file ends at {self.size}", offset, needed, got)
        if not self.direct:
            self._end = offset + got
            # From before the beginning: a folio is only dropped whole, and the last read may have ended within one.
            self.drop(offset - _FOLIO, _FOLIO + got)
            if self._spread:  # what was read ahead for one thread after another had been there, once all have passed
                self.drop(offset - 2 * self._spread, self._spread)
        return got

    def check(self) -> None:
        """Raise WeightsUnreadable if the file was written to since it was opened; what was read may be old and new."""
        with self._open:
            if self._fd < 0:
                return
            stamp = stamp_of(self._fd)
        if stamp != self._stamp:
            why = f"the file changed while it was in use: {self.size} bytes at first, {stamp[0]} now"
            raise WeightsUnreadable(self.path, why)

    def drop(self, offset: int, nbytes: int) -> None:
        """Take a range, which may begin before the file, out of the page cache."""
        offset, nbytes = max(0, offset), nbytes + min(0, offset)
        if nbytes > 0 and hasattr(os, "posix_fadvise"):
            with suppress(OSError):  # only an advice
                os.posix_fadvise(self._fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def settle(self) -> None:
        """Write back what was just written to the file: pages of a fresh download cannot be dropped before."""
        with suppress(OSError):  # a file system for reading only has nothing to write back
            os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; no read may be under way."""
        if not self.direct:
            self._drop_around_end()
        with self._open:
            os.close(self._fd)
            self._fd = -1

    def _drop_around_end(self) -> None:
        """Drop what the kernel read past the end of the last stretch."""
        self.drop(self._end - 2 * self._spread, 2 * self._spread + _READ_AHEAD)

    def _fill(self, into: memoryview, offset: int) -> int:
        got = 0
        while got < len(into):
            count = self._pread(into[got:], offset + got)
            before, got = got, got + count
            if offset + got >= self.size:
                break
            if self.direct:
                got -= got % PAGE  # a direct read goes on at a page; what came of the last one is read again
            if got <= before:
                break
        return got

    def _pread(self, into: memoryview, offset: int) -> int:
        try:
            return os.preadv(self._fd, [into], offset)
        except OSError:
            # Some file systems take the flag and refuse the read, or want more alignment than a page.
            if not self.direct or not self._set_buffered():
                raise
        return os.preadv(self._fd, [into], offset)

    def _set_direct(self) -> bool:
        # Set afterwards, not at opening, so that falling back keeps this very file, whatever its name means by then.
        try:
            if hasattr(os, "O_DIRECT"):
                flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            elif hasattr(fcntl, "F_NOCACHE"):
                fcntl.fcntl(self._fd, fcntl.F_NOCACHE, 1)
            else:
                return False
        except OSError:
            return False
        return True

    def _set_buffered(self) -> bool:
        if not hasattr(os, "O_DIRECT"):
            return False
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        return True
