"""The files of slots: which slot is whose, and how many bytes of the disk they take.

    <folder>/<bytes of a slot>-<number>.slots        up to 1 GiB of equal slots each

A slot is *taken*, *spare* (it has its bytes of the disk and nobody's block) or *bare* (a hole in the file). Slots get
their room on the disk one by one: a segment preallocated whole would count against the cap long before it holds
anything. Not thread-safe: the store's lock guards it; only the slow parts (files, `punch`) belong outside.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from pagein.kv.disk import system

log = logging.getLogger(__name__)

SEGMENT = 1024**3
_NAME = re.compile(r"([1-9][0-9]{3,14})-([0-9]{6})\.slots")
_DISK_BLOCK = 512
"""Bytes in which st_blocks counts, whatever the file system."""


class Slot(NamedTuple):
    """A place for one block."""

    size: int
    segment: int
    number: int

    @property
    def offset(self) -> int:
        """Where it begins in its file."""
        return self.size * self.number


@dataclass(slots=True)
class Segment:
    """One file of slots."""

    path: Path
    size: int
    """Bytes of a slot."""
    taken: set[int] = field(default_factory=set)
    spare: set[int] = field(default_factory=set)
    """They have their bytes; the rest below ``high`` are holes."""
    leaving: set[int] = field(default_factory=set)
    """Being punched: they have their bytes and may not be taken."""
    bare: set[int] = field(default_factory=set)
    high: int = 0
    """Slots that the file was ever long enough for."""
    last: int = -1
    """The one that was taken last."""
    _fd: int = -1
    _direct: int = -1
    _opened: list[int] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Slots that fit."""
        return max(1, SEGMENT // self.size)

    @property
    def bytes(self) -> int:
        """What its slots take on the disk."""
        return self.size * (len(self.taken) + len(self.spare) + len(self.leaving))

    @property
    def fd(self) -> int:
        """The file, through the page cache."""
        if self._fd < 0:
            self._fd = self._open(os.O_CREAT)
            if hasattr(os, "posix_fadvise"):
                # No reading ahead: the next block may lie anywhere, and what came in vain is hard to drop again.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
        return self._fd

    @property
    def direct(self) -> int:
        """The file, past the page cache; the same as `fd` where the file system does not do that."""
        if self._direct < 0:
            self._direct = self.fd
            with suppress(OSError, AttributeError):
                self._direct = self._open(os.O_DIRECT)
        return self._direct

    def only_buffered(self) -> None:
        """The file system took the flag and refused the call: never again."""
        self._direct = self.fd

    def close(self) -> None:
        """Close the file; nobody may be using it."""
        for fd in self._opened:
            os.close(fd)
        self._opened.clear()
        self._fd = self._direct = -1

    def _open(self, flags: int) -> int:
        fd = os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        self._opened.append(fd)
        return fd


class Segments:
    """All files of slots of a store."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._all: dict[tuple[int, int], Segment] = {}

    @property
    def bytes(self) -> int:
        """What all slots take on the disk."""
        return sum(segment.bytes for segment in self._all.values())

    @property
    def spare_bytes(self) -> int:
        """What slots take that hold nothing."""
        return sum(segment.size * len(segment.spare) for segment in self._all.values())

    def of(self, slot: Slot) -> Segment:
        """The file of a slot."""
        return self._all[slot.size, slot.segment]

    def has_spare(self, size: int) -> bool:
        """Whether a slot of this size may be taken without a byte more of the disk."""
        return any(segment.spare for segment in self._all.values() if segment.size == size)

    def take(self, size: int) -> Slot:
        """Take a slot: a spare one first, else a hole, else one at the end of a file.

        The one behind that which was taken last is taken next, else the lowest: a text that is written in one go is
        read in one.
        """
        for (_, number), segment in self._of_size(size):
            if segment.spare:
                return self._took(segment, number, _next(segment.spare, segment.last))
        for (_, number), segment in self._of_size(size):
            if segment.bare or segment.high < segment.most:
                if not segment.bare:
                    segment.bare.add(segment.high)
                    segment.high += 1
                return self._took(segment, number, _next(segment.bare, segment.last))
        number = max((number for other, number in self._all if other == size), default=-1) + 1
        segment = self._all[size, number] = Segment(self._folder / f"{size}-{number:06}.slots", size, high=1)
        return self._took(segment, number, 0)

    def give(self, slot: Slot) -> None:
        """Give a slot back: it stays spare, with its bytes."""
        segment = self.of(slot)
        segment.taken.remove(slot.number)
        segment.spare.add(slot.number)

    def leave(self, least: int | None = None) -> list[Slot]:
        """Choose spare slots to be punched, all or enough for ``least`` bytes; the caller punches, then says `left`."""
        chosen: list[Slot] = []
        for (size, number), segment in self._all.items():
            while segment.spare and (least is None or least > 0):
                slot = segment.spare.pop()
                segment.leaving.add(slot)
                chosen.append(Slot(size, number, slot))
                least = None if least is None else least - size
        return chosen

    def punch(self, slots: Iterable[Slot]) -> set[Slot]:
        """Give the bytes of leaving slots back to the disk, or wipe them where it takes none; return those gone."""
        gone: set[Slot] = set()
        for run in _runs(slots):
            first, length = run[0], run[0].size * len(run)
            try:
                fd = self.of(first).fd
                if system.punch(fd, first.offset, length):
                    gone.update(run)
                else:
                    _wipe(fd, first.offset, length)
            except OSError as error:
                log.warning("slots of %s cannot be given back: %s", self.of(first).path, error)
        return gone

    def left(self, slots: Iterable[Slot], gone: set[Slot]) -> None:
        """Note what `punch` did; a file that holds nothing any more is removed."""
        touched = set()
        for slot in slots:
            segment = self.of(slot)
            segment.leaving.remove(slot.number)
            if slot in gone:
                segment.bare.add(slot.number)
            else:
                segment.spare.add(slot.number)
            touched.add((slot.size, slot.segment))
        for place in touched:
            self._drop_if_empty(place)

    def recount(self, held: Iterable[Slot]) -> set[Slot]:
        """Read the folder: files without a block go, other slots than ``held`` are punched. Return those not there."""
        wanted: dict[tuple[int, int], set[int]] = {}
        for slot in held:
            wanted.setdefault((slot.size, slot.segment), set()).add(slot.number)
        for path in sorted(self._folder.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_file():
                continue
            place = int(match[1]), int(match[2])
            self._count(place, path, wanted.get(place, set()))
        return {
            Slot(*place, number)
            for place, numbers in wanted.items()
            for number in numbers
            if place not in self._all or number not in self._all[place].taken
        }

    def owns(self, name: str) -> bool:
        """Whether a file of this name is one of slots."""
        match = _NAME.fullmatch(name)
        return match is not None and (int(match[1]), int(match[2])) in self._all

    def close(self) -> None:
        """Close all files."""
        for segment in self._all.values():
            segment.close()

    def _count(self, place: tuple[int, int], path: Path, wanted: set[int]) -> None:
        segment = Segment(path, place[0])
        status = os.stat(path)
        there = {number for number in wanted if (number + 1) * segment.size <= status.st_size}
        segment.taken, segment.high = there, max(there, default=-1) + 1
        self._all[place] = segment
        if not there:
            self._drop_if_empty(place)
            return
        os.truncate(path, segment.high * segment.size)
        others = set(range(segment.high)) - there
        if os.stat(path).st_blocks * _DISK_BLOCK <= len(there) * segment.size:
            segment.bare = others
            return
        segment.leaving = set(others)
        slots = [Slot(*place, number) for number in others]
        self.left(slots, self.punch(slots))

    def _of_size(self, size: int) -> list[tuple[tuple[int, int], Segment]]:
        return sorted((place, segment) for place, segment in self._all.items() if place[0] == size)

    def _took(self, segment: Segment, number: int, slot: int) -> Slot:
        segment.taken.add(slot)
        segment.last = slot
        return Slot(segment.size, number, slot)

    def _drop_if_empty(self, place: tuple[int, int]) -> None:
        segment = self._all[place]
        if segment.taken or segment.leaving:
            return
        del self._all[place]
        segment.close()
        try:
            os.unlink(segment.path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("%s cannot be removed: %s", segment.path, error)


def _next(free: set[int], last: int) -> int:
    found = last + 1 if last + 1 in free else min(free)
    free.remove(found)
    return found


def _runs(slots: Iterable[Slot]) -> Iterator[list[Slot]]:
    """Slots that lie behind each other in one file, together: a hole costs the same for one as for a hundred."""
    run: list[Slot] = []
    for slot in sorted(slots):
        if run and (slot.size, slot.segment, slot.number) != (run[-1].size, run[-1].segment, run[-1].number + 1):
            yield run
            run = []
        run.append(slot)
    if run:
        yield run


def _wipe(fd: int, offset: int, length: int) -> None:
    nothing = memoryview(bytes(min(length, 1024**2)))
    for at in range(0, length, len(nothing)):
        os.pwrite(fd, nothing[: length - at], offset + at)
