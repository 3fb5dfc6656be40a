"""Bytes of one block from memory into its slot and back: past the page cache where addresses allow it.

Measured on a virtual NVMe disk, blocks of 1.4 MiB: written 2.0–2.9 GB/s directly, 1.2 GB/s through the page cache with
its pages dropped again; read 3.2 GB/s directly, 0.9–1.2 GB/s through the page cache.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Sequence

from pagein.kv.disk import system
from pagein.kv.disk.layout import PAGE, padded
from pagein.kv.disk.segments import Segment, Slot
from pagein.memory.buffers import Buffer

_BOUNCE = 4 * 1024**2
"""Bytes that are copied at once where a payload does not lie on pages."""
_MOST_VIEWS = 512
"""Views of one call; Linux takes 1024."""
_UNALIGNED = errno.EINVAL
_NOTHING = memoryview(bytes(PAGE))
MOST_NOWHERE = 256 * 1024
_mine = threading.local()


class ShortRead(Exception):
    """A file of slots ends within a block; the argument is what was there."""


def write(segment: Segment, slot: Slot, pieces: Sequence[memoryview]) -> None:
    """Write the pieces, each from a page on; OSError as the system says, ENOSPC before the first byte where it can."""
    system.allocate(segment.fd, slot.offset, slot.size)
    at = slot.offset
    if not all(_on_pages(piece) for piece in pieces):
        _write_copied(segment, pieces, at)
        return
    for start in range(0, len(pieces), _MOST_VIEWS):
        run = pieces[start : start + _MOST_VIEWS]
        _write_direct(segment, run, at)
        at += sum(len(view) for view in run)


def read(segment: Segment, at: int, into: Sequence[memoryview]) -> None:
    """Read pieces that lie from a byte of the file on into views of their lengths.

    Raises OSError as the system says, and ShortRead.
    """
    if all(_on_pages(view) for view in into):
        for start in range(0, len(into), _MOST_VIEWS):
            run = into[start : start + _MOST_VIEWS]
            _read_direct(segment, run, at)
            at += sum(len(view) for view in run)
        return
    _read_copied(segment, into, at)


def nowhere(size: int) -> memoryview:
    """Memory, up to `MOST_NOWHERE`, that a read may fill with what nobody wants."""
    global _rubbish
    if _rubbish is None:
        _rubbish = Buffer(MOST_NOWHERE)
    return _rubbish.view[:size]


_rubbish: Buffer | None = None


def _on_pages(view: memoryview) -> bool:
    place = system.address(view)
    return place is not None and place % PAGE == 0 and len(view) % PAGE == 0


def _read_direct(segment: Segment, views: Sequence[memoryview], at: int) -> None:
    if segment.direct != segment.fd:
        try:
            _read(segment.direct, views, at)
            return
        except OSError as error:
            if error.errno != _UNALIGNED:
                raise
            segment.only_buffered()
    _read(segment.fd, views, at)
    system.drop(segment.fd, at, sum(len(view) for view in views))


def _read(fd: int, views: Sequence[memoryview], at: int) -> None:
    want = sum(len(view) for view in views)
    got = os.preadv(fd, views, at)
    while got < want:
        rest = _behind(views, got)
        more = os.preadv(fd, rest, at + got)
        if more == 0:
            raise ShortRead(f"{got} of {want} bytes are there")
        got += more


def _read_copied(segment: Segment, into: Sequence[memoryview], at: int) -> None:
    """Read pieces through a buffer that lies on pages: faster than through the page cache."""
    parts: list[memoryview] = []
    filled = 0
    for view in into:
        for start in range(0, len(view), _BOUNCE):
            part = view[start : start + _BOUNCE]
            if filled + padded(len(part)) > _BOUNCE:
                at = _scatter(segment, parts, filled, at)
                parts, filled = [], 0
            parts.append(part)
            filled += padded(len(part))
    if parts:
        _scatter(segment, parts, filled, at)


def _scatter(segment: Segment, parts: Sequence[memoryview], filled: int, at: int) -> int:
    bounce, begin = _bounce(), 0
    _read_direct(segment, [bounce[:filled]], at)
    for part in parts:
        part[:] = bounce[begin : begin + len(part)]
        begin += padded(len(part))
    return at + filled


def _write_copied(segment: Segment, pieces: Sequence[memoryview], at: int) -> None:
    """Write pieces through a buffer that lies on pages."""
    bounce, filled = _bounce(), 0
    for piece in pieces:
        for start in range(0, len(piece), _BOUNCE):
            part = piece[start : start + _BOUNCE]
            whole = padded(len(part))
            if filled + whole > _BOUNCE:
                _write_direct(segment, [bounce[:filled]], at)
                at, filled = at + filled, 0
            bounce[filled : filled + len(part)] = part
            bounce[filled + len(part) : filled + whole] = _NOTHING[: whole - len(part)]
            filled += whole
    if filled:
        _write_direct(segment, [bounce[:filled]], at)


def _write_direct(segment: Segment, views: Sequence[memoryview], at: int) -> None:
    if segment.direct != segment.fd:
        try:
            _write(segment.direct, views, at)
            return
        except OSError as error:
            if error.errno != _UNALIGNED:
                raise
            segment.only_buffered()
    _write(segment.fd, views, at)
    system.write_back(segment.fd, at, sum(len(view) for view in views))


def _write(fd: int, views: Sequence[memoryview], at: int) -> None:
    want = sum(len(view) for view in views)
    done = os.pwritev(fd, views, at)
    while done < want:
        done += os.pwritev(fd, _behind(views, done), at + done)


def _behind(views: Sequence[memoryview], count: int) -> list[memoryview]:
    """What of the views lies behind so many bytes."""
    rest: list[memoryview] = []
    for view in views:
        if count < len(view):
            rest.append(view[count:])
        count = max(0, count - len(view))
    return rest


def _bounce() -> memoryview:
    """A buffer on pages, one a thread."""
    if not hasattr(_mine, "buffer"):
        _mine.buffer = Buffer(_BOUNCE)
    view: memoryview = _mine.buffer.view
    return view
