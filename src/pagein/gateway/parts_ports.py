"""What the gateway needs from the daemon for split models: their tasks, their parts as they are now, and acts on them.

The daemon implements `SplitModels`; tests use a fake one. Everything here is asked on the event loop's thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pagein.catalog.split.facts import TaskFacts

LEVELS = ("off", "backbone", "manual", "auto")
"""How much is done on demand, from nothing to everything."""
ABSENT = "absent"
"""The state of every part of a model that is not loaded."""


@dataclass(frozen=True, slots=True)
class TaskView:
    """One task of a split model."""

    kind: str
    """generate, classify, tokens, embed, or call: for programs that load the model as a library, not served."""
    parts: list[str]
    """What a call of it needs."""
    capabilities: list[str]


@dataclass(frozen=True, slots=True)
class PartView:
    """One part of a split model; bytes and seconds; unknown is None."""

    name: str
    role: str
    """backbone, task, shared or adapter."""
    tasks: list[str]
    """Whose calls need it."""
    state: str
    """cold (on the disk alone), loading, hot (in memory), draining, failed, or absent while the model is not loaded."""
    bytes: int
    """That it has in memory now, or has reserved."""
    file_bytes: int
    precision: str | None
    digest: str | None
    """The sha256 of its file; None while the model is not loaded."""
    leases: int
    """Calls that use it now."""
    pinned: bool
    stands_for: str | None
    """The part in whose place it serves."""
    idle_seconds: float | None
    """Since its last use ended; None while it is used, and before."""
    loads: int
    """By this worker."""
    evictions: int
    load_seconds: float | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class ThrashView:
    """How much parts pushed each other out in the last minute."""

    loads: int
    reloads: int
    bound: int | None
    """Reloads in a minute that are let through."""
    seconds_loading: float
    parts: list[str]
    """Which parts came back."""
    thrashing: bool


@dataclass(frozen=True, slots=True)
class PartsView:
    """The parts of one split model, as its worker told last, or by the catalog where it has none."""

    level: str
    """One of `LEVELS`."""
    percent: float
    """Of the requests, that need only the parts of their task; the others take all of the model."""
    plan: str
    """The digest of the plan."""
    allowance: int | None
    """Bytes that all parts together may take; None while the model is not loaded."""
    owned: int
    """Bytes that they take."""
    waiting: int
    """Calls that wait for memory of parts."""
    thrash: ThrashView | None
    age_seconds: float | None
    """How old this is; None while the model is not loaded."""
    tasks: dict[str, TaskView] = field(default_factory=dict)
    parts: list[PartView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class LazyView:
    """One split model in ``GET /health/lazy``."""

    state: str
    """Of the model: absent, loading, resident, …"""
    parts: PartsView


class SplitModels(Protocol):
    """The split models of the daemon as the gateway sees them."""

    def tasks(self, model: str) -> Mapping[str, TaskFacts] | None:
        """What a model can be asked for; None for one that is not split, and for a name that is not configured."""
        ...

    async def look(self) -> dict[str, LazyView]:
        """Every split model, its worker asked freshly: loads nothing, and takes no longer than half a second.

        Where a worker does not answer in time, this is what it told last, with its age.
        """
        ...

    async def view(self, model: str) -> PartsView:
        """The same for one; raises ModelNotFound, and BadRequest for a model that is not split."""
        ...

    async def act(self, model: str, wish: Mapping[str, object]) -> PartsView:
        """Have a worker do what `PARTS_PATH` takes, and return how its parts are then.

        To load a part, the model is loaded first where it is not. Raises like `view` and `Desk.load`, NotLoaded where
        only a loaded model can do it, and the worker's own errors (UnknownPart, InUse, PartsBusy, PartRefused, …).
        """
        ...

    async def set_rollout(self, model: str, level: str | None, percent: float | None) -> PartsView:
        """Change the level, the share of requests that take part, or both; loads no model.

        Holds for the workers after this one, until the model is configured with another roll-out. Raises like `act`.
        """
        ...
