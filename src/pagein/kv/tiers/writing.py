"""Write-behind: what a turn added is copied down after it, in the background, so that demotion is only a drop."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.beside import Beside
from pagein.kv.cache.side import SideUnknown, pack_side
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.known import Node, Text
from pagein.kv.tiers.mover import Move, Mover


@dataclass(slots=True, eq=False)
class _Item:
    """One block to copy."""

    index: int
    group: int
    hold: Hold | None
    """None for a partly filled tail: it was copied at once, so that the next turn can go on in its block."""
    packed: Any = None
    counted: Beside | None = None
    """The copy's bytes, where the device is host memory."""
    obsolete: bool = False

    def drop_copy(self, books: Books) -> None:
        """Let go of the copy. Idempotent."""
        self.packed = None
        if self.counted is not None:
            with books.lock:
                books.copies -= self.counted.size
                self.counted.free()
                books.news.notify_all()


class Writer:
    """Queues copies of sealed blocks. A block that is to be copied is never written: its holder makes it shared."""

    def __init__(self, books: Books, below: Below, mover: Mover) -> None:
        self._books, self._below, self._mover = books, below, mover
        self._tails: dict[int, list[_Item]] = {}

    def seal(self, conversation: Conversation, cache: TieredCache) -> list[Node]:
        """Note which tokens a cache that became idle stands for, and name its blocks (with the lock)."""
        conversation.settle(cache.tokens)
        return self.name_blocks(conversation, cache)

    def name_blocks(self, conversation: Conversation, cache: TieredCache) -> list[Node]:
        """Name all blocks that an idle cache has; returns the nodes of its text (with the lock)."""
        nodes: list[Node] = []
        parent = conversation.root
        for key, tokens in conversation.links[: -(-len(cache.tokens) // BLOCK)]:
            node = self._books.known.add(parent, tokens, key)
            if node is None:  # another text has this key: what follows cannot be named
                break
            nodes.append(node)
            parent = key
        for group, chain in enumerate(cache.batch.rows[0].chains):
            for index, block in enumerate(chain.blocks, chain.start // BLOCK):
                if block is not None and index < len(nodes):
                    self._books.known.only(nodes[index], group, block)
        if nodes:
            self._books.known.let_go(nodes[-1])
        return nodes

    def write_behind(self, conversation: Conversation, cache: TieredCache) -> Move | None:
        """Queue what lies below not yet, unless it is in a turn again; the copies wait for this thread's kernels."""
        books = self._books
        if not self._below.exists:
            return None
        with books.lock:
            while conversation.moving:
                books.news.wait()
            if conversation.active or conversation.kept is not cache or not cache.batch.length:
                return None
            conversation.moving = True  # it neither goes on nor leaves while its tail and its state are copied
        try:
            return self._queue(conversation, cache)
        finally:
            with books.lock:
                conversation.moving = False
                books.news.notify_all()

    def _queue(self, conversation: Conversation, cache: TieredCache) -> Move | None:
        books, after = self._books, self._books.lane.computed()
        with books.lock:
            nodes = self.name_blocks(conversation, cache)
            if not nodes:
                return None
            held = [
                (index, group, books.hold(group, [block]))
                for group, chain in enumerate(cache.batch.rows[0].chains)
                for index, block in enumerate(chain.blocks, chain.start // BLOCK)
                if block is not None and index < len(nodes)
            ]
        items = []
        for index, group, hold in held:
            if self._below.complete(nodes[index], group):
                books.drop(hold)
            else:
                items.append(self._item(nodes, index, group, hold, after))
        self._tails[conversation.id] = [one for one in items if one.hold is None]
        items.sort(key=lambda one: (one.index, one.group))
        side = side_of(cache, conversation)
        text = Text(conversation.root, nodes)
        steps = self._steps(conversation, text, items, side, conversation.tokens, after)

        def end() -> None:
            for item in items:
                item.drop_copy(self._books)
                if item.hold is not None:
                    books.drop(item.hold)

        move = self._mover.add(steps, f"write-behind of {len(items)} blocks", on_end=end)
        conversation.writing = move
        return move

    def goes_on(self, conversation: Conversation) -> None:
        """A turn begins: its tail as it was need not be kept, unless windows or side state may come back to it."""
        whole = not self._books.geometry.side_layers and all(window is None for window in self._books.windows)
        for item in self._tails.pop(conversation.id, []):
            item.obsolete = whole

    def _item(self, nodes: list[Node], index: int, group: int, hold: Hold, after: Any) -> _Item:
        """What has to be done for a block; a tail is copied now."""
        rows, counted = len(nodes[index].tokens), None
        if rows == BLOCK:
            return _Item(index, group, hold)
        if self._books.shares_memory:
            counted = Beside(self._books.device, "a copy of a block that is not full")
            with self._books.lock:
                if not counted.could_hold(self._below.forms[group].bytes(rows)):
                    return _Item(index, group, hold)  # no room for it: a turn that goes on meanwhile copies the block
                self._books.copies += counted.size
        try:
            packed = self._below.packed(hold, rows, after)
        finally:
            self._books.drop(hold)
        return _Item(index, group, None, packed, counted)

    def _steps(
        self,
        conversation: Conversation,
        text: Text,
        items: list[_Item],
        side: Any,
        tokens: tuple[int, ...],
        after: Any,
    ) -> Iterator[None]:
        for item in items:
            if item.hold is None:
                if not item.obsolete:
                    self._below.save(text, item.index, item.group, None, after, item.packed)
                item.drop_copy(self._books)
            else:
                try:
                    self._below.save(text, item.index, item.group, item.hold, after)
                finally:
                    self._books.drop(item.hold)
            yield
        if side is not None:
            self._below.save_side(text, side)
            yield
        if self._below.cold is not None:
            self._below.cold.note(conversation.disk_name, text.root, tokens)
        self._below.trim()


def side_of(cache: TieredCache, conversation: Conversation) -> Any:
    """Return the side state of an idle conversation, packed; None where there is none that stands for its tokens."""
    if not cache.side or cache.batch.length != len(conversation.tokens):
        return None
    try:
        return pack_side(cache.side)
    except SideUnknown:
        return None
