"""One sequence's KV: which blocks hold it, in which order, in every group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from pagein.errors import CacheMismatch, KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Group, blocks_of, kept_from

_AHEAD = 256
"""Tokens that a row is expected to grow by where nobody says (the length of an answer)."""


@dataclass(slots=True)
class Chain:
    """The blocks of a row in one group, in the order of their tokens."""

    group: Group
    blocks: list[int | None] = field(default_factory=list)
    """Ids; None for a block that is not on the device (a lower tier has it): it must be back before the row is read."""
    start: int = 0
    """First token covered, a multiple of 64; above 0 only for a window, whose first blocks have left."""
    retired: list[int] = field(default_factory=list)
    """Blocks of a window that a long prompt jumped over; they go once all layers have passed them."""
    retired_start: int = 0

    @property
    def room(self) -> int:
        """Tokens of the row that end within its blocks."""
        return self.start + len(self.blocks) * BLOCK

    @property
    def run(self) -> int | None:
        """First id where all blocks are on the device and consecutive; None otherwise."""
        blocks = self.blocks
        if not blocks or blocks[0] is None or any(one is None for one in blocks):
            return None
        first = blocks[0]
        return first if blocks == list(range(first, first + len(blocks))) else None

    def ids(self) -> list[int]:
        """All ids; CacheMismatch where a block is not on the device."""
        found = [block for block in self.blocks if block is not None]
        if len(found) < len(self.blocks):
            raise CacheMismatch("blocks of KV on the device", len(self.blocks), len(found))
        return found


@dataclass(frozen=True, slots=True)
class Growth:
    """What a chain needs for more tokens: blocks to take, and what becomes of those that it has."""

    take: int
    own_tail: bool
    """The last block is shared and partly filled: its tokens are copied to the first block taken."""
    jump: int | None
    """Token that a window begins anew at; None where it goes on."""


class Row:
    """One sequence. ``places`` is shared with its batch: an entry is emptied when a group's blocks are elsewhere."""

    def __init__(self, device: DeviceTier, places: list[object], expected: int = 0) -> None:
        self.device = device
        self.places = places
        self.expected = expected
        """Tokens that the row may reach, where somebody knows; it is placed with room for them."""
        self.length = 0
        self.away: frozenset[int] = frozenset()
        """Groups whose rows lie below, not in blocks: the batch has a `Stretch` for them."""
        self.chains = [Chain(group) for group in device.geometry.groups]
        device.rows.add(self)

    def reserve(self, new: int) -> None:
        """Make room for more tokens in every group; KvFull, and nothing changed, where there is none."""
        reserve_all([self], new)

    def growth(self, group: int, new: int, recording: bool, holders: dict[int, int]) -> Growth:
        """Tell what a group needs for more tokens; ``holders`` counts those of tails that rows before it left."""
        if group in self.away:
            return Growth(0, False, None)
        chain, end = self.chains[group], self.length + new
        begin = kept_from(end, chain.group.window)
        if not recording and begin > self.length:
            return Growth(blocks_of(end) - begin // BLOCK, False, begin)
        own = False
        if self.length % BLOCK and new:
            tail = chain.blocks[-1]
            assert tail is not None, "a row in use has its tail on the device"
            with self.device.lock:  # nobody comes to share, between the look and the write, what is written over
                count = holders.get(tail) or self.device.count(group, tail)
                own = count > 1
                if not own:
                    self.device.written(group, tail, self.length % BLOCK)
            holders[tail] = count - own
        return Growth(max(-(-(end - chain.room) // BLOCK), 0) + own, own, None)

    def grow(self, group: int, growth: Growth, got: list[int], recording: bool) -> None:
        """Carry a growth out with the blocks taken for it; the length is not touched."""
        if group in self.away:
            return
        chain = self.chains[group]
        self._drop_retired(group)
        if not recording:
            self._trim(group, kept_from(self.length, chain.group.window))
        if growth.jump is not None:
            chain.retired, chain.retired_start = chain.ids(), chain.start
            chain.blocks, chain.start = list(got), growth.jump
            self.places[group] = None
            return
        if growth.own_tail:
            tail, mine = chain.blocks[-1], got[0]
            assert tail is not None
            self.device.arenas[group].copy_blocks([tail], [mine])
            chain.blocks[-1] = mine
            self.device.release(group, [tail])
        fresh = got[1:] if growth.own_tail else got
        grew_in_place = bool(chain.blocks) and not growth.own_tail and fresh[:1] == [(chain.blocks[-1] or 0) + 1]
        chain.blocks += fresh
        if got and not (grew_in_place and chain.run is not None):
            self._gather_up(group)
            self.places[group] = None

    def _gather_up(self, group: int) -> None:
        """Move a scattered row to one run where it shares nothing and a run with room to grow is free."""
        chain = self.chains[group]
        if chain.run is not None or any(self.device.count(group, block) > 1 for block in chain.ids()):
            return
        run = self.device.take_run(group, len(chain.blocks), self.wanted(group))
        if run is None:
            return
        old = chain.ids()
        self.device.arenas[group].copy_blocks(old, run)
        chain.blocks = list(run)
        self.device.release(group, old)

    def wanted(self, group: int) -> int:
        """Blocks that a group of this row is placed with room for."""
        chain = self.chains[group]
        if chain.group.window is not None:  # it walks through the arena and is moved back once per so many blocks
            return 2 * (chain.group.window // BLOCK + 3)
        return blocks_of(max(self.expected, self.length + _AHEAD))

    def _drop_retired(self, group: int) -> None:
        chain = self.chains[group]
        if chain.retired:
            self.device.release(group, chain.retired)
            chain.retired = []

    def _trim(self, group: int, begin: int) -> None:
        """Let go of blocks before a token (a multiple of 64) that every layer has passed."""
        chain = self.chains[group]
        gone = min((begin - chain.start) // BLOCK, len(chain.blocks))
        if gone <= 0:
            return
        self.device.release(group, [block for block in chain.blocks[:gone] if block is not None])
        del chain.blocks[:gone]
        chain.start += gone * BLOCK
        self.places[group] = None

    def trim(self) -> None:
        """Let go of what no layer looks at any more: after recorded tokens were taken back, or kept."""
        for group, chain in enumerate(self.chains):
            self._drop_retired(group)
            self._trim(group, kept_from(self.length, chain.group.window))

    def can_crop(self, length: int) -> bool:
        """Tell whether the row can go back to a length: a window has dropped what lay before it."""
        return all(
            chain.group.window is None or max(0, length - (chain.group.window - 1)) >= chain.start or length == 0
            for chain in self.chains
        )

    def check_crop(self, length: int) -> None:
        """Raise CacheMismatch where the row cannot go back to a length."""
        if not self.can_crop(length):
            chain = max(self.chains, key=lambda one: one.start)
            window = chain.group.window or 1
            raise CacheMismatch(
                f"taking the KV of {self.length} tokens back to {length}, window of {window}: first token",
                chain.start,
                max(0, length - window + 1),
            )

    def crop(self, length: int) -> None:
        """Go back to fewer tokens; blocks that hold none of them are free at once. CacheMismatch where it cannot."""
        if length >= self.length:
            return
        self.check_crop(length)
        for group, chain in enumerate(self.chains):
            self._drop_retired(group)
            keep = max(blocks_of(length) - chain.start // BLOCK, 0)
            if keep < len(chain.blocks):
                self.device.release(group, [block for block in chain.blocks[keep:] if block is not None])
                del chain.blocks[keep:]
                self.places[group] = None  # of a scattered row a run may be left, which grows without being looked at
            if not chain.blocks:
                chain.start = 0 if length == 0 else chain.start
                self.places[group] = None
        self.length = length

    def fork(self, places: list[object] | None = None) -> Row:
        """Return a row with the same tokens that shares all blocks; whoever writes into one first copies it."""
        if self.away:
            size = sum(self.chains[group].group.block_bytes for group in self.away) * blocks_of(self.length)
            raise KvFull(size, self.device.memory, f"a second row of {self.length} tokens")
        other = Row(self.device, self.places if places is None else places, self.expected)
        other.length = self.length
        with self.device.lock:
            for group, chain in enumerate(self.chains):
                self.device.share(group, chain.ids())
                other.chains[group].blocks = list(chain.blocks)
                other.chains[group].start = chain.start
        return other

    def adopt(self, length: int, tables: Sequence[tuple[int, Sequence[int | None]]]) -> None:
        """Become a row of so many tokens; the caller's holds on blocks, (start, ids) per group, are the row's now."""
        self.release()
        for chain, (start, blocks) in zip(self.chains, tables, strict=True):
            assert start % BLOCK == 0
            assert not blocks or start + len(blocks) * BLOCK >= length, (start, len(blocks), length)
            chain.start, chain.blocks = start, list(blocks)
        self.length = length
        self.moved()

    def moved(self) -> None:
        """Tell the layers that blocks are elsewhere: whoever changes `Chain.blocks` from outside calls it."""
        self.places[:] = [None] * len(self.places)

    def follow(self, group: int, moved: Mapping[int, int]) -> None:
        """Take over the new ids of blocks that were moved."""
        chain = self.chains[group]
        chain.blocks = [block if block is None else moved.get(block, block) for block in chain.blocks]
        chain.retired = [moved.get(block, block) for block in chain.retired]
        self.places[group] = None

    def let_go(self, group: int) -> None:
        """Let go of a group's blocks; the length stays: its rows lie elsewhere (`away`)."""
        self._drop_retired(group)
        chain = self.chains[group]
        blocks = [block for block in chain.blocks if block is not None]
        chain.blocks, chain.start = [], 0
        self.device.release(group, blocks)

    def release(self) -> None:
        """Let go of all blocks at once. Idempotent."""
        for group in range(len(self.chains)):
            self.let_go(group)
        self.length, self.away = 0, frozenset()
        self.moved()


def reserve_all(rows: Sequence[Row], new: int, recording: bool = False) -> int:
    """Make room for more tokens in all rows; returns the blocks taken.

    KvFull, and nothing changed, where one of them finds none.
    """
    try:
        return _reserve_all(rows, new, recording)
    except KvFull:  # whoever shared a tail may have left for it: then it need not be copied
        return _reserve_all(rows, new, recording)


def _reserve_all(rows: Sequence[Row], new: int, recording: bool) -> int:
    plans: list[tuple[Row, int, Growth, list[int]]] = []
    try:
        for group in range(len(rows[0].chains) if rows else 0):
            holders: dict[int, int] = {}
            for row in rows:
                growth = row.growth(group, new, recording, holders)
                plans.append((row, group, growth, _take(row, group, growth)))
    except KvFull:
        for row, group, _, got in plans:
            row.device.release(group, got)
        raise
    for row, group, growth, got in plans:
        row.grow(group, growth, got, recording)
    for row in rows:
        row.length += new
    return sum(growth.take for _, _, growth, _ in plans)


def _take(row: Row, group: int, growth: Growth) -> list[int]:
    if not growth.take:
        return []
    chain = row.chains[group]
    last = chain.blocks[-1] if chain.blocks and growth.jump is None and not growth.own_tail else None
    return row.device.take(group, growth.take, last, _room_for(row, group, growth))


def _room_for(row: Row, group: int, growth: Growth) -> int:
    """Blocks that those taken anew are placed with room for; a tail of one's own only with room to grow."""
    return growth.take + blocks_of(_AHEAD) if growth.own_tail else row.wanted(group)
