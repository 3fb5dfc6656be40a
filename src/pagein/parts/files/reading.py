"""Brings a file's bytes into a buffer within a time, hashing what has come while more comes.

A thread of its own reads, so that a disk that never answers costs the caller no more than the limit. A caller that gave
up leaves everything to that thread: memory that a read may still write to is not given back before.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Protocol

from pagein.errors import PartRefused
from pagein.memory.buffers import Buffer

CHUNK = 1024**2
"""Bytes of one read: large enough for any disk, small enough to be still in the processor's cache when it is hashed."""
Read = Callable[[int, memoryview, int], int]
"""Descriptor, where to, from which byte on → bytes that came; 0 at the file's end."""


class Hash(Protocol):
    """What `hashlib` and `xxhash` have in common."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""
        ...

    def hexdigest(self) -> str:
        """The digest of all bytes so far."""
        ...


def read_from_file(descriptor: int, into: memoryview, offset: int) -> int:
    """Read once, without the GIL."""
    return os.preadv(descriptor, [into], offset)


class Reading:
    """One file on its way into one buffer. Owns the descriptor, and the buffer until `run` has returned."""

    def __init__(
        self,
        descriptor: int,
        buffer: Buffer,
        read: Read,
        clock: Callable[[], float],
        on_failure: Callable[[], None],
        quick: Hash | None = None,
    ) -> None:
        """``on_failure`` is called once, when buffer and descriptor of a failed reading are let go; ``quick`` is a hash
        that costs so little that the thread which reads feeds it.
        """
        self._quick = quick
        self.got = 0
        """Bytes that have come."""
        self._fd, self._buffer, self._read, self._clock, self._on_failure = descriptor, buffer, read, clock, on_failure
        self._changed = threading.Condition()
        self._ended = False
        self._failed = False
        self._error: Exception | None = None
        self._after: os.stat_result | None = None

    def run(self, file: str, seconds: float, full: Hash | None = None) -> os.stat_result:
        """Fill the buffer, feed the hash, and return the file's status after the last byte; raises PartRefused."""
        ends = self._clock() + seconds
        try:
            threading.Thread(target=self._fill, name="pagein-part", daemon=True).start()
        except RuntimeError as error:
            self._let_go(descriptor=True)
            raise PartRefused(file, f"cannot be read: {error}") from None
        try:
            hashed = 0
            while hashed < self._buffer.nbytes:
                came = self._wait(file, hashed, ends, seconds)
                if full is not None:
                    full.update(self._buffer.view[hashed:came])
                hashed = came
            with self._changed:
                self._changed.wait_for(lambda: self._ended)
            if self._after is None:
                raise PartRefused(file, f"cannot be read: {self._error}", bytes=self.got)
            return self._after
        except BaseException:
            self._give_up()
            raise

    def _wait(self, file: str, hashed: int, ends: float, seconds: float) -> int:
        """Return how many bytes are there, more than were hashed."""
        with self._changed:
            while True:
                left = ends - self._clock()
                if left <= 0:
                    why = f"gave {self.got} of {self._buffer.nbytes} bytes within {seconds:g} s, the limit"
                    raise PartRefused(file, why, bytes=self.got, planned_bytes=self._buffer.nbytes)
                if self._error is not None:
                    why = f"cannot be read at byte {self.got}: {getattr(self._error, 'strerror', None) or self._error}"
                    raise PartRefused(file, why, bytes=self.got)
                if self.got > hashed:
                    return self.got
                if self._ended:
                    why = f"was cut to {self.got} bytes while it was read, the plan says {self._buffer.nbytes}"
                    raise PartRefused(file, why, bytes=self.got, planned_bytes=self._buffer.nbytes)
                self._changed.wait(left)

    def _fill(self) -> None:
        try:
            view = self._buffer.view
            while self.got < len(view) and not self._failed:
                count = self._read(self._fd, view[self.got : self.got + CHUNK], self.got)
                if count == 0:
                    break
                if self._quick is not None:
                    self._quick.update(view[self.got : self.got + count])
                with self._changed:
                    self.got += count
                    self._changed.notify_all()
            self._after = os.fstat(self._fd)
        except Exception as error:  # told by the caller, in its thread
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                failed = self._failed
                self._changed.notify_all()
            os.close(self._fd)
            if failed:
                self._let_go()

    def _give_up(self) -> None:
        """Leave the rest to the thread that reads, or do it here where that one is through."""
        with self._changed:
            self._failed = True
            ended = self._ended
        if ended:
            self._let_go()

    def _let_go(self, descriptor: bool = False) -> None:
        if descriptor:
            os.close(self._fd)
        self._buffer.close()
        self._on_failure()
