"""Keeps a task's parts in memory for as long as they are used: a ``with`` block, one call, a stream.

Which lease a call without ``task`` belongs to: the one that was begun in a function which is running now, the innermost
of them. So a generator that waits at a ``yield`` with a lease of its own changes nothing for who resumes others
meanwhile. Where that cannot be told (`TaskUnclear`) nothing is guessed.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType, TracebackType
from typing import Any

from pagein.errors import TaskUnclear
from pagein.parts.adapters import ACTIVE, Selection
from pagein.parts.groups import Group

_HELD: ContextVar[tuple[weakref.ref[Lease], ...]] = ContextVar("pagein_leases", default=())
"""Leases that were begun in this context, the last one last."""


class Lease:
    """A task's parts, in memory from `begin` to `end`; ends by itself when it is collected."""

    def __init__(
        self,
        task: str,
        owner: object,
        acquire: Callable[[], tuple[Group, ...]],
        release: Callable[[Sequence[Group]], None],
        select: Callable[[Sequence[Group]], Selection],
    ) -> None:
        self.task, self.owner = task, owner
        self.groups: tuple[Group, ...] = ()
        self.selection: Selection | None = None
        """The adapters of its task, while it is held."""
        self._acquire, self._release, self._select = acquire, release, select
        self._finalizer: Any = None
        self._live = False
        self._frame: FrameType | None = None
        self._under: tuple[weakref.ref[Lease], ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether it has begun and not ended."""
        return self._live

    def begin(self) -> Lease:
        """Take the parts, and bring in those that are away; raises as `Residency.acquire`."""
        self._begin(None)
        return self

    def end(self) -> None:
        """Give the parts back. Idempotent, and from any thread."""
        self._live = False
        if self._finalizer is not None:
            self._finalizer()
        self._frame, self.groups, self.selection = None, (), None

    @contextmanager
    def only(self) -> Iterator[None]:
        """Let the calls that this thread makes in the block be this lease's own: they take none beside it."""
        assert self.selection is not None, f"the lease of {self.task!r} is not held"
        token = ACTIVE.set(self.selection)
        try:
            yield
        finally:
            ACTIVE.reset(token)

    def __enter__(self) -> Lease:
        self._begin(sys._getframe(1))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def _begin(self, frame: FrameType | None) -> None:
        assert not self.is_held, f"the lease of {self.task!r} is held already"
        self.groups = self._acquire()
        self._finalizer = weakref.finalize(self, self._release, self.groups)
        self._finalizer.atexit = False
        self.selection = self._select(self.groups)
        self._frame, self._live = frame, True
        before = _held()
        running = _running() if before else {}
        self._under = tuple(weakref.ref(one) for one in before if one._frame in running)
        _HELD.set((*(weakref.ref(one) for one in before), weakref.ref(self)))


def in_force(owner: object, task: str | None, known: Iterable[str]) -> Lease | None:
    """Return the lease that a call of a model is made under, None where there is none; raises TaskUnclear.

    With ``task`` it is one of that task. Without, one of several only where it is plain which.
    """
    held = [one for one in _held() if one.owner is owner]
    if task is not None:
        return next((one for one in reversed(held) if one.task == task), None)
    if not held or len({one.task for one in held}) == 1:
        return held[-1] if held else None
    running = _running()
    inner = min(
        (one for one in reversed(held) if one._frame in running), key=lambda one: running[one._frame], default=None
    )
    if inner is None:
        raise TaskUnclear(list(known), [one.task for one in held])
    later = held[held.index(inner) + 1 :]
    hidden = [one for one in later if one.task != inner.task and any(ref() is inner for ref in one._under)]
    if any(one._frame not in running for one in hidden):  # begun below it, by a generator that now waits: whose turn?
        raise TaskUnclear(list(known), [inner.task, *(one.task for one in hidden)])
    return inner


def selected(owner: object) -> Selection | None:
    """Return the adapters that a module of a model computes with now: the call's, else those of the lease in force.

    None where there is neither: the module is then what it is without adapters. Raises TaskUnclear.
    """
    active = ACTIVE.get()
    if active is not None and active.owner is owner:
        return active
    held = in_force(owner, None, ()) if _HELD.get() else None
    return None if held is None else held.selection


def _held() -> list[Lease]:
    return [one for ref in _HELD.get() if (one := ref()) is not None and one.is_held]


def _running() -> dict[FrameType | None, int]:
    """Return the frames of this thread that run now, with their distance from here."""
    found: dict[FrameType | None, int] = {}
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        found[frame] = len(found)
        frame = frame.f_back
    return found


class Stream:
    """What a call yields bit by bit: its lease lasts until the end, an error, `close`, or until nobody wants it."""

    def __init__(self, inner: Iterator[Any], selection: Selection, release: Callable[[], None]) -> None:
        self._inner, self._selection = inner, selection
        self._finalizer = weakref.finalize(self, _end_stream, inner, release)
        self._finalizer.atexit = False

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Any:
        return self._step(lambda: next(self._inner))

    def send(self, value: Any) -> Any:
        """Go on with a value; as generators do."""
        return self._step(lambda: self._inner.send(value))  # type: ignore[attr-defined]

    def throw(self, error: BaseException) -> Any:
        """Go on with an error; as generators do."""
        return self._step(lambda: self._inner.throw(error))  # type: ignore[attr-defined]

    def close(self) -> None:
        """End it and its lease. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _step(self, step: Callable[[], Any]) -> Any:
        token = ACTIVE.set(self._selection)
        try:
            return step()
        except BaseException:
            self.close()
            raise
        finally:
            ACTIVE.reset(token)


def _end_stream(inner: Iterator[Any], release: Callable[[], None]) -> None:
    try:
        close = getattr(inner, "close", None)
        if close is not None:
            close()
    finally:
        release()
