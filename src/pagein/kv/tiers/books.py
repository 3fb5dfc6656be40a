"""What all parts of a pool share: its lock, its device, what is known of blocks, its conversations, its counters."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.device import DeviceTier
from pagein.kv.snapshots.worth import Pace
from pagein.kv.tiers.answers import Source
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.gate import Gate
from pagein.kv.tiers.known import Known
from pagein.kv.tiers.lanes import Lane
from pagein.kv.tiers.settings import KvSettings

if TYPE_CHECKING:
    from pagein.kv.cache.tiered import TieredCache


@dataclass(slots=True, eq=False)
class Hold:
    """Holders that the pool itself adds to blocks while it copies them; the ids follow when blocks move."""

    group: int
    blocks: list[int]


@dataclass(slots=True)
class Traffic:
    """What went one way."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0

    def add(self, size: int, seconds: float) -> None:
        """Count a copy of one block, or a part of it."""
        self.blocks += 1
        self.bytes += size
        self.seconds += seconds

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second; None before the first."""
        return self.bytes / self.seconds if self.seconds > 0 else None


@dataclass(slots=True)
class Counters:
    """Since the pool began."""

    turns: int = 0
    prompt_tokens: int = 0
    reused: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    """Tokens by source."""
    hits: dict[Source, int] = field(default_factory=lambda: dict.fromkeys(Source, 0))
    """Turns by source."""
    demoted: int = 0
    """Conversations that left the device, wholly or in part."""
    dropped: int = 0
    """Blocks that left with no copy below."""
    damaged: int = 0
    """Blocks that did not verify or could not be read."""
    skipped: int = 0
    """Promotions that were not worth it."""
    parked: int = 0
    full: int = 0
    """Times that no room could be made."""
    down: Traffic = field(default_factory=Traffic)
    """Device to host memory."""
    up: Traffic = field(default_factory=Traffic)
    """Host memory to device."""
    written: Traffic = field(default_factory=Traffic)
    """To the disk."""
    read: Traffic = field(default_factory=Traffic)
    """From the disk."""
    gathered: Traffic = field(default_factory=Traffic)
    """Layers of conversations that are larger than the device, between it and the tier below: both ways."""
    stretched: int = 0
    """Turns that became larger than the device."""


class Books:
    """The shared state. Its lock is the device's; nothing waits for a copy or the disk while holding it."""

    def __init__(
        self, device: DeviceTier, lane: Lane, settings: KvSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.device, self.lane, self.settings, self.clock = device, lane, settings, clock
        self.geometry = device.geometry
        self.lock = device.lock
        self.news = threading.Condition(device.lock)
        """Told when a hold ends."""
        self.gate = Gate()
        """Passed by each step of a copy, and held while blocks move."""
        self.known = Known(len(device.geometry.groups))
        self.windows = [group.window for group in device.geometry.groups]
        self.conversations: dict[int, Conversation] = {}
        self.names: dict[tuple[str, str], Conversation] = {}
        self.holds: set[Hold] = set()
        self.copies = 0
        """Bytes of tails that wait for the disk: they are counted, but stand in nobody's way for long."""
        self.pace = Pace()
        self.counters = Counters()
        device.on_free.append(self.known.freed)
        device.on_write.append(self.known.cut)
        device.on_move.append(self._follow)

    def count_written(self, size: int, seconds: float) -> None:
        """A block went to the disk."""
        with self.lock:
            self.counters.written.add(size, seconds)

    def hold(self, group: int, blocks: Iterable[int]) -> Hold:
        """Keep blocks from being freed until `drop`."""
        found = Hold(group, list(blocks))
        with self.lock:
            self.device.share(group, found.blocks)
            self.holds.add(found)
        return found

    def adopt_taken(self, group: int, blocks: Sequence[int]) -> Hold:
        """The same for blocks that were just taken: the hold is their holder."""
        found = Hold(group, list(blocks))
        with self.lock:
            self.holds.add(found)
        return found

    def drop(self, hold: Hold) -> None:
        """End a hold. Idempotent."""
        with self.lock:
            if hold in self.holds:
                self.holds.remove(hold)
                self.device.release(hold.group, hold.blocks)
                self.news.notify_all()

    def hand_over(self, hold: Hold) -> list[int]:
        """End a hold and leave its holders to whoever asks: a row that adopts the blocks."""
        with self.lock:
            self.holds.remove(hold)
            return hold.blocks

    def touch(self, conversation: Conversation) -> None:
        """It was used now."""
        conversation.used_at = self.clock()

    def blocks_for(self, tokens: int) -> tuple[int, ...]:
        """Return blocks of each group that a turn takes at most on its way to so many tokens.

        A window that a prompt jumps over holds its old blocks beside the new ones for a pass.
        """
        most = -(-tokens // BLOCK)
        return tuple(most if window is None else min(most, 2 * (window // BLOCK + 3)) for window in self.windows)

    def claim(self, one: Conversation) -> tuple[int, ...]:
        """Return blocks of each group that a turn may count on, or has."""
        row = one.row
        held = [len(chain.blocks) + len(chain.retired) for chain in row.chains] if row is not None else []
        promised = one.promise or (0,) * len(self.windows)
        return tuple(max(pair) for pair in zip(promised, held or promised, strict=True))

    def pending(self, one: Conversation) -> int:
        """Return the bytes that a turn may count on beside its blocks, and does not have yet."""
        cache = one.cache_ref()
        has = 0 if cache is None else cache.batch.side.size + cache.batch.gathers.size
        return max(one.beside - has, 0) if one.active else 0

    def amounts(self, blocks: Sequence[int]) -> tuple[int, ...]:
        """Return blocks of each group in the units that the device is short of: bytes where groups share memory."""
        if not self.shares_memory:
            return tuple(blocks)
        groups = self.geometry.groups
        return (sum(count * group.block_bytes for count, group in zip(blocks, groups, strict=True)),)

    @property
    def shares_memory(self) -> bool:
        """True where any group may use the whole budget."""
        return self.device.by_page

    def capacity(self) -> tuple[int, ...]:
        """Return what of the device's budget blocks may take, in these units."""
        if not self.shares_memory:
            return tuple(one.blocks for one in self.device.grounds)
        return (self.device.memory - self.device.beside + self.copies,)

    def free(self) -> tuple[int, ...]:
        """Return what of it nobody holds."""
        return (self.device.free_bytes,) if self.shares_memory else tuple(one.free for one in self.device.grounds)

    def spare(self) -> int:
        """Return bytes that nobody has, nor any turn a claim to (with the lock); where groups share memory."""
        turns = [one for one in self.conversations.values() if (one.active or one.pinned) and not one.parked]
        claims = sum(self.bytes_of(self.claim(one)) + self.pending(one) for one in turns)
        return max(min(self.capacity()[0] - claims, self.free()[0]), 0)

    def bytes_of(self, blocks: Sequence[int]) -> int:
        """Return the bytes of so many blocks of each group."""
        return sum(count * group.block_bytes for count, group in zip(blocks, self.geometry.groups, strict=True))

    def _follow(self, group: int, moved: dict[int, int]) -> None:
        for hold in self.holds:
            if hold.group == group:
                hold.blocks = [moved.get(block, block) for block in hold.blocks]
        self.known.moved(group, moved)


def cache_of(conversation: Conversation) -> TieredCache | None:
    """Return a conversation's cache, where somebody still holds it."""
    return conversation.kept or conversation.cache_ref()
