"""What the block store is asked for and answers; a block that is not kept comes back as `Skipped`, no hit as `Miss`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self


class Kind(IntEnum):
    """Which blocks of a group a prefix needs; the numbers stand in catalogues."""

    EVERY = 0
    """All of them: full attention."""
    SLIDING = 1
    """Those of the last tokens: sliding-window attention."""
    EXACT = 2
    """One that was made at exactly this length: state that cannot be cut back."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a group of layers needs of a prefix."""

    kind: Kind
    window: int = 0
    """Tokens that a token sees, itself included; of SLIDING only."""

    @classmethod
    def every(cls) -> Self:
        """All blocks."""
        return cls(Kind.EVERY)

    @classmethod
    def sliding(cls, window: int) -> Self:
        """The blocks of the last ``window`` - 1 tokens."""
        assert window > 0, window
        return cls(Kind.SLIDING, window)

    @classmethod
    def exact(cls) -> Self:
        """One block at exactly the length."""
        return cls(Kind.EXACT)

    def first_token(self, length: int) -> int:
        """The first token whose rows are needed where a text of so many goes on."""
        return max(0, length - (self.window - 1)) if self.kind is Kind.SLIDING else 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A block of one group that serves a prefix."""

    key: bytes
    group: str
    index: int
    """Which block of the text."""
    first: int
    """The first token that it holds."""
    rows: int
    """Rows of it that the prefix may use; all of them for EXACT."""
    tokens: int
    """Rows that it has."""
    form: str
    """What whoever put it said of how its bytes are packed."""
    piece_bytes: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Of all pieces together."""
        return sum(self.piece_bytes)


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix that every group can serve."""

    length: int
    refs: Mapping[str, tuple[Ref, ...]]
    """By group, in the order of the text; EXACT has one."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A block was written."""

    bytes: int
    """What it takes on the disk."""
    seconds: float
    left: int
    """Blocks that left for it."""


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What left with a conversation."""

    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ConversationEntry:
    """A conversation that holds blocks."""

    tenant: str
    conversation: str
    model: str
    tokens: int
    """Of the longest prefix that it holds."""
    bytes: int
    """Of all blocks that it holds, shared ones included."""
    own_bytes: int
    """Of those that no other conversation holds: what forgetting it frees."""
    idle_seconds: float
    pinned: bool


@dataclass(frozen=True, slots=True)
class Usage:
    """What lies in the store's folder, in bytes of the disk."""

    blocks: int
    conversations: int
    bytes: int
    """Of all files there, as `du` counts them."""
    block_bytes: int
    """Of the slots of blocks, those that are being written included."""
    spare_bytes: int
    """Of slots that hold nothing any more, and serve the next block."""
    other_bytes: int
    """Of the catalogue and of what is not ours."""
    cap: int | None
    floor: int
    """Bytes that the disk must have free after a write."""
