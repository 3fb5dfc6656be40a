"""Preempts a turn between two passes and brings it back exactly: its blocks rest below, found by nobody else."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagein.errors import KvBusy, KvFull, KvLost
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.arena import Arena
from pagein.kv.cache.geometry import blocks_of
from pagein.kv.cache.row import Chain, Row
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.disk.digest import digest
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.spill import Spill


@dataclass(slots=True, eq=False)
class _Resting:
    """What the rows of a turn have in one group."""

    spill: Spill
    digests: list[bytes]
    """Of each piece, which is a block as it was: never squeezed."""
    rows: list[tuple[int, list[int]]]
    """First token of each row, and the pieces that it has; some may be of several rows."""


@dataclass(slots=True, eq=False)
class Parked:
    """A turn that waits below."""

    length: int
    away: frozenset[int]
    """Groups that lie below anyway (`Stretch`)."""
    groups: list[_Resting]

    def close(self) -> None:
        """Give back what it has below. Idempotent."""
        for group in self.groups:
            group.spill.close()


class Parking:
    """In the thread of the cache's user, between two of its passes."""

    def __init__(self, books: Books, below: Below) -> None:
        self._books, self._below = books, below

    def park(self, one: Conversation, cache: TieredCache) -> None:
        """Move a turn's blocks below. Raises KvFull, with the turn as it was, where they cannot all be kept there."""
        books, batch = self._books, cache.batch
        if one.parked is not None or batch.recording or not batch.agreed:
            raise KvBusy(f"conversation {one.name or one.id} cannot be parked: it is parked already, or within a pass")
        what = f"parking a turn of {batch.length} tokens"
        if not self._below.exists:
            size = books.bytes_of([len(chain.blocks) for chain in batch.rows[0].chains])
            raise KvFull(size, 0, f"{what} (there is no tier below the device)")
        batch.arrive()
        with ExitStack() as undo:
            parked = Parked(batch.length, batch.rows[0].away, [])
            undo.callback(parked.close)
            for group in range(len(batch.rows[0].chains)):
                self._save(parked, group, batch.rows, what)
            undo.pop_all()
        with books.lock:
            one.parked, one.promise = parked, None
            if batch.stretch is not None:
                batch.stretch.rest()
            for row in batch.rows:
                row.release()
            batch.gathers.free()
            batch.idle = True  # a pass now would begin it anew, in blocks of its own
            books.counters.parked += 1

    def resume(self, one: Conversation, cache: TieredCache) -> None:
        """Bring a parked turn back; KvFull while there is no room, KvLost where a block below is no longer right."""
        parked, books, batch = one.parked, self._books, cache.batch
        assert parked is not None, "the pool asks only for parked ones"
        with ExitStack() as undo:
            holds: list[Hold] = []
            expected = blocks_of(max(parked.length, batch.expected)) if len(batch.rows) == 1 else 0
            for group, resting in enumerate(parked.groups):
                count = len(resting.digests)
                taken = books.device.take(group, count, None, expected) if count else []
                holds.append(books.adopt_taken(group, taken))
                undo.callback(books.drop, holds[-1])
            self._load(parked, holds)
            with books.lock:
                blocks = [books.hand_over(hold) for hold in holds]
                undo.pop_all()
                self._adopt(parked, batch.rows, blocks)
        one.parked, batch.idle = None, False
        parked.close()

    def drop(self, one: Conversation) -> None:
        """Its turn ended while it was parked."""
        parked, one.parked = one.parked, None
        if parked is not None:
            parked.close()

    def _save(self, parked: Parked, group: int, rows: list[Row], what: str) -> None:
        """Copy the blocks of all rows down, each once; KvFull where there is no room for them."""
        books, whole = self._books, blocks_of(parked.length)
        arena, size = books.device.arenas[group], books.geometry.groups[group].block_bytes
        resting = _Resting(Spill(self._below, size, what), [], [])
        parked.groups.append(resting)
        with books.lock:  # ids may change without it
            tables = [(chain.start, chain.ids()[: whole - chain.start // BLOCK]) for chain in _chains(rows, group)]
            pieces = {
                block: piece for piece, block in enumerate(dict.fromkeys(one for _, ids in tables for one in ids))
            }
            hold = books.hold(group, pieces)
        resting.rows = [(start, [pieces[block] for block in ids]) for start, ids in tables]
        after, flat = books.lane.computed(), self._below.scratch(size)
        try:
            resting.spill.grow(len(pieces))
            for piece in range(len(pieces)):
                with books.gate.passing():
                    books.lane.down(partial(_pack, arena, hold, piece), flat, after)
                resting.spill.write(piece, 0, flat)
                resting.digests.append(digest([memoryview(flat.numpy())]))
        finally:
            books.drop(hold)

    def _load(self, parked: Parked, holds: list[Hold]) -> None:
        """Copy the pieces up again, each verified before."""
        books, after = self._books, self._books.lane.computed()
        for group, (resting, hold) in enumerate(zip(parked.groups, holds, strict=True)):
            arena, flat = books.device.arenas[group], self._below.scratch(books.geometry.groups[group].block_bytes)
            for piece, known in enumerate(resting.digests):
                resting.spill.read(piece, 0, flat)
                if digest([memoryview(flat.numpy())]) != known:
                    raise KvLost(f"a parked turn of {parked.length} tokens did not come back: block {piece} is damaged")
                with books.gate.passing():
                    books.lane.up(flat, partial(_unpack, arena, hold, piece), after)
                    books.lane.settle()  # its bytes are read into again
        books.lane.landing().wait()

    def _adopt(self, parked: Parked, rows: list[Row], blocks: list[list[int]]) -> None:
        """Let the rows have the blocks (with the lock): one holder is there of each, the others are added."""
        for group, resting in enumerate(parked.groups):
            every = [blocks[group][piece] for _, pieces in resting.rows for piece in pieces]
            self._books.device.share(group, every)
            self._books.device.release(group, blocks[group])
        for number, row in enumerate(rows):
            tables = [
                (resting.rows[number][0], [blocks[group][piece] for piece in resting.rows[number][1]])
                for group, resting in enumerate(parked.groups)
            ]
            row.adopt(parked.length, tables)
            row.away = parked.away


def _chains(rows: list[Row], group: int) -> list[Chain]:
    return [row.chains[group] for row in rows]


def _pack(arena: Arena, hold: Hold, at: int) -> Any:
    return arena.pack_block(hold.blocks[at])


def _unpack(arena: Arena, hold: Hold, at: int, flat: Any) -> None:
    arena.unpack_block(hold.blocks[at], flat)
