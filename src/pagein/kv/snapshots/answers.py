"""What the store answers: each with its reason, so that a log, a header and a metric can say the same (rule 10)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pagein.kv.snapshots.header import Header


@dataclass(frozen=True, slots=True)
class Entry:
    """A snapshot that lies in the store."""

    id: str
    path: Path
    header: Header
    bytes: int
    """The size of its file."""


class MissKind(StrEnum):
    """Why nothing was restored; a label for metrics."""

    EMPTY = "empty"
    """Nothing is stored for this tenant and these settings."""
    TOKENS = "tokens"
    """What is stored begins otherwise."""
    UNCUT = "uncut"
    """What is stored goes on otherwise, and the engine cannot cut it back."""
    SETTINGS = "settings"
    """These tokens are stored, but were computed by other weights, types, settings or builds."""
    DAMAGED = "damaged"
    """The snapshot did not verify; it was moved aside."""
    GONE = "gone"
    """The snapshot left the store meanwhile."""
    FAILED = "failed"
    """The payload could not be handed over: no space, no right."""


@dataclass(frozen=True, slots=True)
class Miss:
    """Nothing can be restored."""

    kind: MissKind
    reason: str


@dataclass(frozen=True, slots=True)
class Match:
    """A snapshot begins as the prompt does."""

    snapshot: Entry
    common_tokens: int
    """Tokens that both begin with. The engine cuts the rest of the snapshot off, and computes at least one token."""


@dataclass(frozen=True, slots=True)
class Fetched:
    """A payload was verified and handed over."""

    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Kept:
    """A snapshot was written."""

    snapshot: Entry
    seconds: float
    left: tuple[Entry, ...]
    """Snapshots that left for it: those that it replaces, and the least valuable ones."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A snapshot was not written."""

    reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in the store's folder, in bytes."""

    snapshots: int
    bytes: int
    """Of all files there: snapshots, damaged ones that were moved aside, and what is no snapshot of ours."""
    reserved: int
    """Promised to snapshots that are being written."""
    damaged_bytes: int
    other_bytes: int
    cap: int
    floor: int
    """Bytes that the disk must have free after a write."""
