"""What the gateway shows of saved conversations, and the one interface that looks after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class SnapshotView:
    """One saved conversation, without a word of it; bytes and seconds."""

    id: str
    model: str | None
    """Whose worker saved it, by the name that it had then; None where that was not noted."""
    fingerprint: str
    """The first digits of the digest over all that must be the same for a restore."""
    weights: str
    """The first digits of the digest of the weights."""
    engine: str
    build: str
    kv_type: str
    """Types of K and V: ``f16/f16``."""
    context: int
    tokens: int
    bytes: int
    created: float
    """Seconds since the epoch."""
    idle_seconds: float
    worth_seconds: float
    """What a restore saves against computing it anew: measured when it was saved, else assumed by its tokens."""
    leaves: int
    """Its place among those that leave when room is needed; 1 = next."""


@dataclass(frozen=True, slots=True)
class ReuseView:
    """What one model's requests reused since the daemon's start; the three kinds of tokens add up to the prompts."""

    model: str
    restored: int
    """Prompt tokens that were brought back from a snapshot, and used."""
    cached: int
    """Prompt tokens that the worker still had."""
    computed: int
    restores: int
    saves: int
    misses: dict[str, int] = field(default_factory=dict)
    """Why nothing was restored, and how often."""


@dataclass(frozen=True, slots=True)
class UsageView:
    """What the folder of snapshots takes, in bytes."""

    snapshots: int
    bytes: int
    """Of all files there."""
    reserved: int
    """Promised to what is being written."""
    damaged_bytes: int
    """Of damaged snapshots, moved aside."""
    cap: int
    floor: int
    """What the disk must have free after a write."""


@dataclass(frozen=True, slots=True)
class BlocksView:
    """What a worker that keeps KV caches by itself has on the disk, in bytes."""

    model: str
    bytes: int
    cap: int
    live: bool
    """Its worker runs."""


@dataclass(frozen=True, slots=True)
class SavedView:
    """Everything about snapshots (`GET /api/state`)."""

    usage: UsageView
    snapshots: list[SnapshotView]
    """The last used first."""
    models: list[ReuseView]
    blocks: list[BlocksView] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """A snapshot or a block that did not verify, or a store of blocks that could not be read."""

    id: str
    kind: str
    """damaged (it was moved aside; a block was dropped), or failed (it could not be read now)."""
    reason: str


@dataclass(frozen=True, slots=True)
class Verified:
    """What reading snapshots, or KV blocks, through found (`POST /api/state/verify`)."""

    checked: int
    bytes: int
    faults: list[Fault]
    left: int = 0
    """Bytes of blocks that are still to be read."""
    next: str | None = None
    """Where to go on with these; None where all was read."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What left (`POST /api/state/gc`, `DELETE /api/state/snapshots`)."""

    snapshots: int
    bytes: int
    blocks: int = 0
    """Bytes of blocks that left beside."""


class Snapshots(Protocol):
    """The saved conversations; asked on the event loop, which no method blocks."""

    async def view(self) -> SavedView:
        """All of them."""
        ...

    async def usage(self) -> UsageView:
        """What they take, and may take."""
        ...

    async def blocks(self) -> list[BlocksView]:
        """What workers that keep KV caches by themselves have on the disk."""
        ...

    def reuse(self) -> list[ReuseView]:
        """What requests reused, by model."""
        ...

    async def remove(self, snapshots: Sequence[str] | None) -> Removed:
        """Remove these, or all and all blocks; raises SnapshotNotFound for one that is not here, and removes none."""
        ...

    async def verify(self, snapshot: str | None) -> Verified:
        """Read one through, or all, one after the other; what is damaged is moved aside. Raises SnapshotNotFound."""
        ...

    async def verify_blocks(self, model: str, after: str | None) -> Verified:
        """Read KV blocks of a model through for some seconds, from a place on; damaged ones are dropped.

        Raises ModelNotFound where it keeps none, ValueError for a place that is none.
        """
        ...

    async def gc(self, idle: float | None) -> Removed:
        """Sweep leftovers and damaged ones; remove what is idle for longer (None: `state.retain`) or over the cap."""
        ...

    async def pools(self) -> dict[str, dict[str, Any]]:
        """What workers that keep KV caches by themselves report of them, by model; ``error`` where one does not."""
        ...
