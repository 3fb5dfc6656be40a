"""Byte ranges of weight files read into buffers by a few threads, one reading after the other, while others compute."""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, Thread
from time import perf_counter
from typing import NamedTuple

from pagein.errors import ReadingStopped, WeightsAway
from pagein.memory.buffers import Buffer
from pagein.weights.reading.files import PAGE, ReadMode, Stamp, WeightFile

CHUNK = 16 * 1024 * 1024
"""Bytes of one read. On an idle machine 4 MiB give the same speed. Beside a model that computes on every core a thread
comes back to its next read late: there four reads of 4, 8, 16 MiB gave 1.3, 1.5, 1.9 of 2.6 GB/s (2 cores).
"""
THREADS = {ReadMode.DIRECT: 4, ReadMode.BUFFERED: 1}
"""Reads under way at a time. Through the page cache it is one, as the kernel reads ahead best in a single stream."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of a file and its place in a buffer, all in multiples of 4096; the last may run past the file's end."""

    file: Path
    offset: int
    nbytes: int
    into: int
    needed: int | None = None
    """Bytes from the offset on that must come; None: the file has to reach into the last page."""

    def __post_init__(self) -> None:
        assert self.nbytes > 0, self
        assert self.offset % PAGE == self.nbytes % PAGE == self.into % PAGE == 0, self


class ReadStats(NamedTuple):
    """What a reader has read since its start; the difference of two is what one token cost."""

    bytes: int
    reads: int
    seconds: float
    """Time during which at least one read was under way."""


class _Piece(NamedTuple):
    file: Path
    offset: int
    nbytes: int
    into: int
    needed: int


class Reading:
    """Some extents on their way into a buffer. Made by `Reader.read`."""

    def __init__(self, pieces: Iterator[_Piece], buffer: Buffer, nbytes: int, lock: Lock) -> None:
        self.nbytes = nbytes
        self.urgent = False
        self._pieces = pieces
        self._view = buffer.view
        self._landed = Condition(lock)
        self._under_way = 0
        self._left = nbytes  # not handed out yet
        self._error: BaseException | None = None
        self._files: set[WeightFile] = set()
        self._begin: float | None = None
        self._end: float | None = None

    @property
    def done(self) -> bool:
        """Whether nothing writes into the buffer any more: all came, or it failed, or it was cancelled."""
        return not self._left and not self._under_way

    @property
    def seconds(self) -> float | None:
        """Time from the start of the first read to the end of the last; None before."""
        return None if self._begin is None or self._end is None else self._end - self._begin

    def wait(self) -> None:
        """Block until it is done; raises WeightsUnreadable, where not all bytes came or a file changed."""
        with self._landed:
            while not self.done:
                self._landed.wait()
        if self._error is not None:
            raise self._error
        for file in self._files:
            file.check()

    def _take(self) -> _Piece | None:
        """Hand out the next read, if there is one left (under the lock)."""
        if not self._left:
            return None
        piece = next(self._pieces)
        self._left -= piece.nbytes
        self._under_way += 1
        if self._begin is None:
            self._begin = perf_counter()
        return piece

    def _settle(self, now: float) -> None:
        """Wake who waits, if nothing is left to come (under the lock)."""
        if self.done:
            self._end = now
            self._landed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """Hand out no further read (under the lock)."""
        if not self.done and self._error is None:
            self._error = error
        self._left = 0


class _Queue:
    """What the threads share. They know nothing of the `Reader`, so that a forgotten one can be collected."""

    def __init__(self, mode: ReadMode, spread: int) -> None:
        self.mode, self.spread = mode, spread
        self.lock = Lock()
        self.filled = Condition(self.lock)
        self.readings: deque[Reading] = deque()
        self.closing = False
        self.files: dict[Path, WeightFile] = {}
        self.opening = Lock()
        self.stamps: Mapping[Path, Stamp] = {}
        self.bytes = self.reads = self.under_way = 0
        self.seconds = self.since = 0.0

    def work(self) -> None:
        """Carry out reads until the end; the body of each thread."""
        while (task := self._next()) is not None:
            reading, piece = task
            got, error = 0, None
            try:
                view = reading._view[piece.into : piece.into + piece.nbytes]
                file = self._open(piece.file)
                reading._files.add(file)
                got = file.read(view, piece.offset, piece.needed)
                del view
            except BaseException as fault:  # whatever it is: it belongs to who waits, and no waiter may hang
                error = fault
            self._landed(reading, got, error)
            del task, reading  # an idle thread must not keep the last buffer alive

    def _next(self) -> tuple[Reading, _Piece] | None:
        with self.lock:
            while True:
                while self.readings:
                    reading = self.readings[0]
                    if (piece := reading._take()) is not None:
                        if not self.under_way:
                            self.since = perf_counter()
                        self.under_way += 1
                        return reading, piece
                    self.readings.popleft()
                if self.closing:
                    return None
                self.filled.wait()

    def _landed(self, reading: Reading, got: int, error: BaseException | None) -> None:
        with self.lock:
            now = perf_counter()
            self.bytes, self.reads = self.bytes + got, self.reads + 1
            self.under_way -= 1
            if not self.under_way:
                self.seconds += now - self.since
            if error is not None:
                reading._fail(error)
            reading._under_way -= 1
            reading._settle(now)

    def _open(self, path: Path) -> WeightFile:
        with self.opening:
            file = self.files.get(path)
            if file is None:
                file = self.files[path] = WeightFile(path, self.mode, self.spread, self.stamps.get(path))
            return file

    def stop(self) -> None:
        """Let the threads end after the reads that are under way."""
        with self.lock:
            self.closing = True
            while self.readings:
                reading = self.readings.popleft()
                reading._fail(ReadingStopped("the reader was closed before all was read"))
                reading._settle(perf_counter())
            self.filled.notify_all()


class Reader:
    """Threads that read extents into buffers, in the order in which they were asked for."""

    def __init__(
        self,
        mode: ReadMode,
        threads: int | None = None,
        chunk: int = CHUNK,
        stamps: Mapping[Path, Stamp] | None = None,
    ) -> None:
        """``stamps``: of the files whose headers were read; another file at such a path is refused."""
        threads = THREADS[mode] if threads is None else threads
        assert threads > 0, threads
        assert chunk > 0, chunk
        assert chunk % PAGE == 0, chunk
        self.mode, self.threads, self.chunk = mode, threads, chunk
        self._queue = _Queue(mode, threads * chunk if threads > 1 else 0)
        self._queue.stamps = stamps or {}
        self._pid = os.getpid()
        self._closed = False
        # Daemons: a read that hangs in a dead disk must not keep the process from ending.
        self._threads = [Thread(target=self._queue.work, name=f"weights-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def read(self, extents: Sequence[Extent], buffer: Buffer, *, urgent: bool = False) -> Reading:
        """Queue extents behind what was asked before, and return at once; ``urgent`` ones go before all others.

        The buffer may not be touched before the reading is done. Whatever goes wrong is raised by `Reading.wait`.
        """
        assert not self._closed, "the reader is closed"
        self.check_process()
        size = buffer.nbytes
        assert all(e.into >= 0 and e.into + e.nbytes <= size for e in extents), f"an extent leaves {size} bytes"
        total = sum(extent.nbytes for extent in extents)
        reading = Reading(_pieces(extents, self.chunk), buffer, total, self._queue.lock)
        reading.urgent = urgent
        with self._queue.lock:
            queued = self._queue.readings
            queued.insert(sum(one.urgent for one in queued) if urgent else len(queued), reading)
            self._queue.filled.notify(min(self.threads, -(-total // self.chunk) + 1))
        return reading

    def check_process(self) -> None:
        """Raise WeightsAway in a forked process, where a reading would never end."""
        if self._pid != os.getpid():
            raise WeightsAway(
                f"the weights are read by threads of process {self._pid}, which did not come along into the forked "
                f"process {os.getpid()}",
                hint="load the model in the process that computes with it, or start processes by spawn",
            )

    def cancel(self, reading: Reading) -> None:
        """Give a reading up; returns once nothing writes into its buffer any more, by which its `wait` raises."""
        with self._queue.lock:
            reading._fail(ReadingStopped("the reading was cancelled"))
            reading._settle(perf_counter())
            while not reading.done:
                reading._landed.wait()

    @property
    def stamps(self) -> Mapping[Path, Stamp]:
        """The stamps that files have to have."""
        return self._queue.stamps

    @property
    def stats(self) -> ReadStats:
        """What was read until now."""
        queue = self._queue
        with queue.lock:
            running = perf_counter() - queue.since if queue.under_way else 0.0
            return ReadStats(queue.bytes, queue.reads, queue.seconds + running)

    def direct(self, file: Path) -> bool | None:
        """Whether a file is read past the page cache; None before its first read."""
        with self._queue.opening:
            opened = self._queue.files.get(file)
            return None if opened is None else opened.direct

    def close(self) -> None:
        """Cancel what is queued, end the threads after the reads under way, and close the files. Idempotent."""
        if self._closed or self._pid != os.getpid():  # a forked process has neither the threads nor, surely, the lock
            return
        self._closed = True
        self._queue.stop()
        for thread in self._threads:
            thread.join()
        for file in self._queue.files.values():
            file.close()
        self._queue.files.clear()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True):
            words = f"a reader of weights with {self.threads} threads was not closed"
            warnings.warn(words, ResourceWarning, stacklevel=2, source=self)
            self._queue.stop()


def _pieces(extents: Sequence[Extent], chunk: int) -> Iterator[_Piece]:
    """Cut extents into reads of about equal size, none longer than the chunk."""
    for extent in extents:
        count = -(-extent.nbytes // chunk)
        step = -(-extent.nbytes // (count * PAGE)) * PAGE
        must = extent.nbytes - PAGE + 1 if extent.needed is None else extent.needed
        for start in range(0, extent.nbytes, step):
            nbytes = min(step, extent.nbytes - start)
            needed = min(nbytes, max(0, must - start))
            yield _Piece(extent.file, extent.offset + start, nbytes, extent.into + start, needed)
