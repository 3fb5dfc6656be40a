"""Facts and wishes, as they enter the one inbox."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagein.errors import PageinError
from pagein.memory.pressure import PressureState

if TYPE_CHECKING:
    from pagein.scheduler.state import Limits, ModelState


@dataclass(frozen=True, slots=True)
class Requested:
    """A client wants a lease on a model. ``request_id`` is unique for the life of the daemon."""

    request_id: int
    model: str
    keep_alive: float | None = None
    """Its own wish for the time that the model stays idle, ``math.inf`` for no limit; None wishes nothing."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended, whether it was waiting or held a lease: answered, failed or disconnected."""

    request_id: int
    answered: bool = True
    """The client got its answer, so the worker did the whole work of a request."""
    silent: bool = False
    """The worker sent nothing for the model's time-out."""


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """An operator (or the start of the daemon) wants a model loaded without using it."""

    model: str
    speculative: bool = False
    """Nobody waits for it: under pressure it does not begin."""


@dataclass(frozen=True, slots=True)
class LoadUnwanted:
    """The operators who wanted a load have left; it goes on while requests wait for it or nobody needs its room."""

    model: str


@dataclass(frozen=True, slots=True)
class UnloadWanted:
    """An operator wants a model unloaded; leases in use are let finish. A later load or pin calls it off."""

    model: str


@dataclass(frozen=True, slots=True)
class PinChanged:
    """An operator pins or unpins a model."""

    model: str
    pinned: bool


@dataclass(frozen=True, slots=True)
class BecameReady:
    """A worker is ready; ``used`` is what it takes now, per pool, as measured; empty where unknown."""

    model: str
    used: dict[str, int]
    load_seconds: float
    sleeps: bool = False
    """Its engine can sleep, and may."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker that outlived an earlier daemon was taken over, with what it was granted and takes now."""

    model: str
    allowance: dict[str, int]
    used: dict[str, int]
    sleeps: bool = False


@dataclass(frozen=True, slots=True)
class LoadBroke:
    """A load failed or was given up; the process is gone."""

    model: str
    error: PageinError


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """A resident worker ended without being asked to; the process is gone."""

    model: str
    error: PageinError


@dataclass(frozen=True, slots=True)
class Stopped:
    """A worker that was told to stop is gone; its bytes are measured next."""

    model: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The bytes of a stopped worker were measured to be back, or the wait for that is over."""

    model: str
    left: dict[str, int] = field(default_factory=dict)
    """pool → bytes that it left behind; they stay charged."""


@dataclass(frozen=True, slots=True)
class LeftChanged:
    """What an ended worker left behind was measured again."""

    model: str
    left: dict[str, int]


@dataclass(frozen=True, slots=True)
class Slept:
    """A worker that was told to sleep does, or says so; ``used`` is what it was measured to keep of ``before``."""

    model: str
    before: dict[str, int]
    used: dict[str, int]


@dataclass(frozen=True, slots=True)
class SleepBroke:
    """A worker that was told to sleep did not, or lied; it must leave instead."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class ResizeWanted:
    """An operator wants a loaded model to live with so many bytes of its pool, until it is unloaded."""

    model: str
    bytes: int
    pool: str | None = None
    """The pool that is meant, where the operator named one; refused unless it is that of the weights."""


@dataclass(frozen=True, slots=True)
class Resized:
    """What became of that: the worker keeps to the allowance, and was measured since, or it refused."""

    model: str
    allowance: dict[str, int]
    error: PageinError | None = None
    plan: tuple[str, ...] = ()
    """The worker's new plan in words."""


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """Something outside Pagein wants memory; ``room`` is unique for the life of the daemon."""

    room: str
    pool: str
    bytes: int
    measured: bool = False
    """Its process is measured; else what it was given counts as used at once."""


@dataclass(frozen=True, slots=True)
class RoomEnded:
    """An outsider gave its memory back, ended, or does not want it any more."""

    room: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The configuration was edited. Models that changed drain and return; what is not named here stays as it is."""

    changed: dict[str, ModelState] = field(default_factory=dict)
    """New models and changed ones, as they are to be."""
    resized: frozenset[str] = frozenset()
    """Those of them in which nothing changed but their own `memory`: one that can live with that does not leave."""
    allotted: frozenset[str] = frozenset()
    """The same, where only others' changes leave them other bytes; what an operator set stands against that."""
    removed: frozenset[str] = frozenset()
    limits: Limits | None = None
    budgets: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    """A sample: what each live worker takes, and what the machine has available, read after that.

    In this order, so that bytes which were taken between the two readings count twice rather than not at all.
    """

    used: dict[str, dict[str, int]]
    """model → pool → bytes."""
    available: dict[str, int | None] = field(default_factory=dict)
    """pool → bytes available on the machine, or None where unknown."""
    daemon: int | None = None
    """Bytes of RAM that the daemon itself takes. It is never charged less than the first of these figures."""
    pressure: PressureState | None = None
    """How hard memory is to get; None where this sample did not look."""


@dataclass(frozen=True, slots=True)
class NeedLearned:
    """The catalog knows better what a model takes, for its next load."""

    model: str
    need: dict[str, int]
    source: str


@dataclass(frozen=True, slots=True)
class Ticked:
    """Time passed: look at bounds, lingering and back-off."""


@dataclass(frozen=True, slots=True)
class ShutdownWanted:
    """The daemon stops: refuse what waits, load nothing more."""


Event = (
    Requested
    | Finished
    | LoadWanted
    | LoadUnwanted
    | UnloadWanted
    | PinChanged
    | BecameReady
    | Adopted
    | LoadBroke
    | WorkerExited
    | Stopped
    | Freed
    | LeftChanged
    | Slept
    | SleepBroke
    | ResizeWanted
    | Resized
    | RoomWanted
    | RoomEnded
    | Reconfigured
    | Measured
    | NeedLearned
    | Ticked
    | ShutdownWanted
)
