"""What the pool answers: how much of a prompt it had already and from where, each with its reason (rule 10). Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Source(StrEnum):
    """The lowest tier that a reused prefix came from; a label for metrics."""

    LIVE = "live"
    """The conversation's own blocks, still on the device."""
    SHARED = "shared"
    """Blocks on the device that another conversation of the same tenant computed."""
    HOST = "host"
    """At least one block came up from host memory."""
    DISK = "disk"
    """At least one block came up from the disk."""
    NONE = "none"
    """Nothing was reused."""


class Why(StrEnum):
    """What kept a turn from reusing more; a label for metrics."""

    EMPTY = "empty"
    """Nothing is known of this conversation, nor of one that begins alike."""
    TOKENS = "tokens"
    """What is known goes on otherwise, or cannot be taken back to where it does."""
    SETTINGS = "settings"
    """What is known was computed by other weights, types or settings."""
    SLOWER = "slower"
    """Computing it is faster than bringing it up, by measured speeds."""
    DAMAGED = "damaged"
    """What lies below is not what was written, or cannot be read."""
    ENCODER = "encoder"
    """What a decoder keeps depends on more than its own tokens."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """What is reused at the begin of a turn; the other tokens of the prompt are computed."""

    tokens: int
    """Tokens of the prompt whose KV is there: never all of them."""
    source: Source
    reason: str
    """Why not more, or where from; in words and numbers."""
    prompt: int = 0
    """Tokens of the prompt."""
    promoted_bytes: int = 0
    """Bytes that came up from a lower tier for it."""
    seconds: float = 0.0
    """What that took, as far as `begin` waited for it."""
    kind: Why | None = None
    """Why not more, as a label; None where all but the last token is reused."""

    @property
    def computed(self) -> int:
        """Tokens of the prompt that are left to compute."""
        return self.prompt - self.tokens


class Place(StrEnum):
    """Where a conversation's KV rests."""

    ACTIVE = "active"
    """In a turn: on the device, untouchable."""
    WARM = "warm"
    """Idle, all of it on the device."""
    PARTLY = "partly"
    """Idle, some blocks on the device, the others below."""
    HOST = "host"
    """Idle, in host memory."""
    COLD = "cold"
    """Idle, on the disk only."""
    PARKED = "parked"
    """Preempted in a turn: kept below, comes back exactly."""
    GONE = "gone"
    """Known by its tokens only: a turn of it computes anew."""


@dataclass(frozen=True, slots=True)
class Flushed:
    """What a flush came to."""

    blocks: int
    """Blocks that were written."""
    left: int
    """Blocks that the deadline cut off; their conversations compute these tokens anew after a restart."""
    seconds: float
