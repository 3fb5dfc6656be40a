"""What the pool knows of a conversation beside the cache that its user holds."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pagein.kv.blocks.keys import chain

if TYPE_CHECKING:
    from pagein.kv.cache.row import Row
    from pagein.kv.cache.tiered import TieredCache
    from pagein.kv.tiers.parking import Parked

Links = list[tuple[bytes, tuple[int, ...]]]
"""A text as `keys.chain` gives it."""


@dataclass(slots=True, eq=False)
class Conversation:
    """One conversation. While idle it holds its cache; while in a turn, or never begun, its user does."""

    id: int
    name: str | None
    tenant: str
    cache_ref: weakref.ref[TieredCache]
    stamp: str = ""
    """Tells those without a name apart, also over restarts."""
    kept: TieredCache | None = None
    """The cache, while it is idle: dropped by its user it would take its blocks along."""
    root: bytes = b""
    fields: Mapping[str, str] = field(default_factory=dict)
    """What its KV was computed with."""
    tokens: tuple[int, ...] = ()
    """Tokens that its KV stands for, as of its last end."""
    links: Links = field(default_factory=list)
    active: bool = False
    moving: bool = False
    """It is on its way down or up in another thread: a turn waits for that."""
    parked: Parked | None = None
    """Where a preempted turn rests."""
    pinned: bool = False
    used_at: float = 0.0
    prompt: tuple[int, ...] = ()
    """The prompt of the turn that runs."""
    base: int = 0
    """Tokens that were reused for it."""
    promise: tuple[int, ...] | None = None
    """Blocks per group that the turn may still count on, those that it has included."""
    beside: int = 0
    """Bytes that it may count on beside its blocks, those that it has included."""
    writing: Any = None
    """The move that copies it down."""

    @property
    def cache(self) -> TieredCache:
        """The cache; whoever calls holds it."""
        found = self.cache_ref()
        assert found is not None, "its user holds it"
        return found

    @property
    def row(self) -> Row | None:
        """Its blocks; None once its cache is gone."""
        cache = self.cache_ref()
        return None if cache is None else cache.batch.rows[0]

    @property
    def disk_name(self) -> str:
        """What the disk knows it by; whoever has no name is found again by its tokens only."""
        return self.name if self.name is not None else f"~{self.stamp}"

    @property
    def idle(self) -> bool:
        """True between two turns: its blocks may leave."""
        return self.kept is not None and not self.active

    def settle(self, tokens: Sequence[int]) -> None:
        """Note which tokens its KV stands for."""
        self.tokens = tuple(tokens)
        self.links = chain(self.root, self.tokens)

    def forget_tokens(self) -> None:
        """Its KV stands for nothing any more."""
        self.tokens, self.links = (), []
