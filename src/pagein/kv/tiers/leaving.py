"""Makes room on the device: idle conversations leave, their blocks copied down before they are free."""

from __future__ import annotations

from collections.abc import Sequence

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.known import Text
from pagein.kv.tiers.mover import Mover
from pagein.kv.tiers.policy import Idle, Leave, victims
from pagein.kv.tiers.settings import Mark
from pagein.kv.tiers.writing import Writer, side_of


class Leaving:
    """Carries out what `policy` says. Never touches a conversation that is in a turn or pinned."""

    def __init__(self, books: Books, below: Below, mover: Mover, writer: Writer) -> None:
        self._books, self._below, self._mover, self._writer = books, below, mover, writer
        settings = books.settings
        self._mark = Mark(settings.device_share, settings.device_share - settings.slack)

    def make_room(self, group: int, count: int) -> bool:
        """Let so many blocks of a group become free; True where any did. `DeviceTier.on_full`."""
        books = self._books
        with books.lock:
            wanted = [0] * len(books.windows)
            wanted[group] = count
            need = [want - free for want, free in zip(books.amounts(wanted), books.free(), strict=True)]
        return self.free(need)

    def free(self, need: Sequence[int]) -> bool:
        """Let as much become free (bytes, or blocks of each group); True where anything did."""
        books = self._books
        with books.lock:
            idle = self._idle()
            chosen = victims(idle, need)
            if not chosen and idle:  # they share all they have: one leaves so that the next one frees
                coldest = max((one for one in idle if not one.pinned), key=lambda one: one.idle_seconds, default=None)
                chosen = [Leave(coldest.id, None, "shares all its blocks")] if coldest is not None else []
        left = [self.leave(books.conversations[one.id], one.blocks) for one in chosen if one.id in books.conversations]
        if not any(left):
            return self._wait_for_holds()
        return True

    @property
    def due(self) -> bool:
        """True where `trim` may have something to do."""
        books = self._books
        return books.device.used_bytes > books.settings.device_share * books.device.memory

    def trim(self) -> None:
        """Demote ahead of need, where the device is filled beyond its mark; the last used conversations stay."""
        books = self._books
        while True:
            with books.lock:
                total, used = books.device.memory, books.device.used_bytes
                excess = self._mark.excess(used, total)
                recent = sorted((one for one in books.conversations.values() if one.idle), key=lambda one: -one.used_at)
                spared = {one.id for one in recent[: books.settings.warm]}
                chosen = [one for one in self._idle() if one.id not in spared and not one.pinned]
                if excess <= 0 or not chosen:
                    return
                coldest = max(chosen, key=lambda one: one.cost_of_keeping)
            if not self.leave(books.conversations[coldest.id], None):
                return

    def leave(self, conversation: Conversation, blocks: int | None) -> bool:
        """Let a conversation leave the device, or so many blocks of its end; True where it did.

        Blocks are copied down first; without a tier below, or where it refuses, they are lost and computed anew.
        """
        books = self._books
        with books.lock:
            cache = conversation.kept
            if cache is None or conversation.active or conversation.moving:
                return False
            conversation.moving = True
        try:
            move = conversation.writing
            if move is not None and not move.ended and not self._mover.is_mover:
                self._mover.hurry(move)
                move.wait()
            lost = self._copy_down(conversation, cache, blocks)
            with books.lock:
                self._drop(conversation, cache, blocks)
                books.counters.demoted += 1
                books.counters.dropped += lost
        finally:
            with books.lock:
                conversation.moving = False
                books.news.notify_all()
        return True

    def drop(self, conversation: Conversation) -> None:
        """Let a conversation leave the device without a copy."""
        with self._books.lock:
            cache = conversation.kept
            if cache is not None and not conversation.active and not conversation.moving:
                self._drop(conversation, cache, None)

    def _copy_down(self, conversation: Conversation, cache: TieredCache, blocks: int | None) -> int:
        """Save what lies nowhere below yet; returns how many blocks are lost."""
        books, lost = self._books, 0
        if not self._below.exists:
            return sum(len(chain.blocks) for chain in cache.batch.rows[0].chains)
        after = books.lane.computed()
        with books.lock:
            nodes = self._writer.name_blocks(conversation, cache)
            here = -(-cache.batch.length // BLOCK)  # some of its end may have left before
            jobs = [
                (index, group, books.hold(group, [block]))
                for group, chain in enumerate(cache.batch.rows[0].chains)
                for index, block in enumerate(chain.blocks, chain.start // BLOCK)
                if block is not None and (blocks is None or index >= here - blocks)
            ]
        saved, text = 0, Text(conversation.root, nodes)
        for index, group, hold in sorted(jobs, key=lambda job: job[0]):
            try:
                if index >= len(nodes):
                    lost += 1
                elif not self._below.has(nodes[index], group):
                    kept = self._below.save(text, index, group, hold, after)
                    saved, lost = saved + kept, lost + (not kept)
            finally:
                books.drop(hold)
        if cache.side and nodes and len(nodes) == here and not self._below.has_side(nodes[-1]):
            side = side_of(cache, conversation)
            saved += side is not None and self._below.save_side(text, side)
        if saved and self._below.cold is not None:
            self._below.cold.note(conversation.disk_name, conversation.root, conversation.tokens)
        return lost

    def _drop(self, conversation: Conversation, cache: TieredCache, blocks: int | None) -> None:
        """Free the blocks (with the lock)."""
        whole = -(-cache.batch.length // BLOCK)
        if blocks is None or blocks >= whole:
            cache.reset()
            if conversation.name is None:  # found again by its tokens only
                conversation.kept = None
                books = self._books
                if conversation.cache_ref() is None:
                    books.conversations.pop(conversation.id, None)
        else:
            cache.crop_to((whole - blocks) * BLOCK)

    def _wait_for_holds(self) -> bool:
        """Wait for a copy under way that keeps freed blocks, or for who leaves for others; False where nothing is."""
        books = self._books
        if self._mover.is_mover:
            return False
        with books.lock:
            before = books.device.free_bytes
            leaving = [one for one in books.conversations.values() if one.moving]
            while self._mover.waiting or leaving:
                books.news.wait(1.0)
                if books.device.free_bytes > before or not all(one.moving for one in leaving):
                    return True
            return books.device.free_bytes > before

    def _idle(self) -> list[Idle]:
        """Who may leave (with the lock)."""
        books, now = self._books, self._books.clock()
        held: dict[tuple[int, int], int] = {}
        for hold in books.holds:
            for block in hold.blocks:
                held[hold.group, block] = held.get((hold.group, block), 0) + 1
        return [
            self._as_idle(one, one.kept, held, now)
            for one in books.conversations.values()
            if one.idle and not one.moving and one.kept is not None and one.kept.batch.length
        ]

    def _as_idle(self, one: Conversation, cache: TieredCache, held: dict[tuple[int, int], int], now: float) -> Idle:
        books, chains = self._books, cache.batch.rows[0].chains
        counts = [
            sum(
                block is not None and books.device.count(group, block) - held.get((group, block), 0) <= 1
                for block in chain.blocks
            )
            for group, chain in enumerate(chains)
        ]
        size = books.bytes_of([len(chain.blocks) for chain in chains])
        below = self._below.exists
        back = books.pace.restoring.seconds(size) if below else len(one.tokens) / books.pace.prefill.value
        return Idle(
            one.id,
            books.amounts(counts),
            max((len(chain.blocks) for chain in chains), default=0),
            size,
            now - one.used_at,
            back,
            finished=not one.tokens,
            pinned=one.pinned,
            cuttable=not books.geometry.side_layers and all(window is None for window in books.windows),
        )
