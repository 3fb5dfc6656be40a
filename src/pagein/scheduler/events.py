"""Facts and wishes, as they enter the one inbox."""

from __future__ import annotations

from dataclasses import dataclass, field

from pagein.errors import PageinError


@dataclass(frozen=True, slots=True)
class Requested:
    """A client wants a lease on a model. ``request_id`` is unique for the life of the daemon."""

    request_id: int
    model: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The request ended, whether it was waiting or held a lease: answered, failed or disconnected."""

    request_id: int
    answered: bool = True
    """The client got its answer, so the worker did the whole work of a request."""


@dataclass(frozen=True, slots=True)
class LoadWanted:
    """An operator (or the start of the daemon) wants a model loaded without using it."""

    model: str


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
    """The bytes of a stopped worker were measured to be back."""

    model: str


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
    | LoadBroke
    | WorkerExited
    | Stopped
    | Freed
    | Measured
    | NeedLearned
    | Ticked
    | ShutdownWanted
)
