"""One part in a process: where it is, who uses it, and what became of its last load.

    cold → loading → hot → draining → cold          loading → failed(until) → loading

All fields change under the lock of the model's `Residency`; each part has a condition of its own on that lock.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import torch

from pagein.catalog.split.plan import Part, PartFile
from pagein.errors import PageinError
from pagein.parts.deferring import DeferringLock
from pagein.parts.publish import Cast, Held, Seats

LONGEST_WAIT = 60.0
"""Seconds that a refused file is not tried again, at most."""


class State(StrEnum):
    """Where a part is."""

    COLD = "cold"
    """On the disk alone."""
    LOADING = "loading"
    """Its memory is reserved; one call reads it, others wait for that one."""
    HOT = "hot"
    """Its tensors hang in the model."""
    DRAINING = "draining"
    """Its memory is being given back."""
    FAILED = "failed"
    """Its last load came to nothing; waits a while where the file itself was refused."""


@dataclass(eq=False)
class Group:
    """One part."""

    part: Part
    precision: str
    entry: PartFile
    changed: threading.Condition
    rivals: tuple[str, ...] = ()
    """Parts with tensors of the same names: one of them at a time can be there."""
    state: State = State.COLD
    leases: int = 0
    held: Held | None = None
    error: BaseException | None = None
    """Why the last load came to nothing; None after one that did not."""
    failures: int = 0
    """In a row."""
    failed_until: float = 0.0
    owed: bool = False
    """A load that was given up still has its memory: a read may yet write to it."""
    cast: Cast | None = None
    cast_types: dict[str, torch.dtype] = field(default_factory=dict)
    cast_bytes: int = 0
    """What the tensors take after the cast."""
    outside: weakref.ref[memoryview] | None = None
    """What someone holds of the part beside all leases."""
    used_at: float | None = None
    loads: int = 0
    evictions: int = 0
    last_error: str | None = None
    seconds: float | None = None
    """What the last load took."""

    @property
    def name(self) -> str:
        """The part's name."""
        return self.part.name

    @property
    def tasks(self) -> str:
        """Its tasks, as messages say them."""
        return " or ".join(self.part.tasks) or self.name

    def need(self, on_host: bool) -> int:
        """Bytes that a load takes at most: the file's, and those of copies beside it."""
        if self.cast is None:
            return self.entry.nbytes
        return self.cast_bytes + (self.entry.nbytes if on_host else 0)

    def fail(self, error: BaseException, now: float, lasting: bool) -> None:
        """Note why a load came to nothing; ``lasting`` where trying again at once is of no use."""
        self.state = State.FAILED
        self.failures += 1
        self.last_error = error.message if isinstance(error, PageinError) else f"{type(error).__name__}: {error}"
        # A copy: the traceback of the error itself keeps frames alive, and with them whatever they hold.
        lost = RuntimeError(f"part {self.name!r} could not be loaded: {self.last_error}")
        self.error = error.retold(error.message) if isinstance(error, PageinError) else lost
        self.failed_until = now + min(LONGEST_WAIT, 2.0 ** min(self.failures - 1, 10)) if lasting else now
        self.changed.notify_all()

    def retold(self) -> BaseException:
        """Return the error of the last load, for one more who waited for it: each raises an object of its own."""
        assert self.error is not None
        return self.error.retold(self.error.message) if isinstance(self.error, PageinError) else self.error


@dataclass(eq=False)
class Claim:
    """The reserved memory of one load."""

    group: Group
    handed: bool = field(default=False)
    """The reader has it, and says when it is back."""
    settled: bool = field(default=False)
    """It was confirmed or cancelled."""


def groups_of(
    parts: Iterable[Part], seats: Seats, lock: DeferringLock, precisions: Mapping[str, str]
) -> dict[str, Group]:
    """Return a group for each part, all cold; raises ModelUnsuited where a part does not fit the model."""
    groups: dict[str, Group] = {}
    for part in parts:
        precision = precisions[part.name]
        entry = part.file(precision)
        seats.check(part, entry)
        groups[part.name] = Group(part, precision, entry, threading.Condition(lock))  # type: ignore[arg-type]
    return groups


def set_rivals(groups: Iterable[Group], seats: Seats) -> None:
    """Tell each group which others have tensors in the same places."""
    every = list(groups)
    owners: dict[int, set[str]] = {}
    for one in every:
        for name in seats.names(one.part):
            owners.setdefault(id(seats.seat(name)), set()).add(one.name)
    for one in every:
        found = set[str]().union(*(owners[id(seats.seat(name))] for name in seats.names(one.part)))
        one.rivals = tuple(sorted(found - {one.name}))
