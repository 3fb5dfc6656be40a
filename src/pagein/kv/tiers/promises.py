"""Admission by blocks: a turn that was promised its blocks can always finish (with the books' lock throughout)."""

from __future__ import annotations

from pagein.errors import KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.geometry import blocks_of
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.stretching import Stretching


class Promises:
    """Keeps the sum of what turns may still take within the budget."""

    def __init__(self, books: Books, stretching: Stretching) -> None:
        self._books, self._stretching = books, stretching

    def could(self, tokens: int) -> bool:
        """Tell whether one more turn can be admitted, and reach so many tokens whatever the others do."""
        books = self._books
        with books.lock:
            running = sum(one.active and not one.parked for one in books.conversations.values())
            return running < books.settings.active and self._lack(None, tokens, self._stretching.least(tokens)) is None

    def could_ever(self, tokens: int) -> bool:
        """Tell whether the device has room for so many tokens once everybody else has left."""
        books, least = self._books, self._stretching.least(tokens)
        blocks, beside = books.blocks_for(tokens), self._beside(None, tokens, stretched=least is not None)[0]
        if books.shares_memory:
            return (books.bytes_of(blocks) if least is None else least) + beside <= books.device.memory
        return all(want <= ground.blocks for want, ground in zip(blocks, books.device.grounds, strict=True))

    def make(self, one: Conversation, tokens: int) -> bool:
        """Promise a turn what it needs for so many tokens; KvFull, with the former promise kept, where that cannot be.

        True where they are more than the device holds: it is then promised one layer at a time (`Stretching`).
        """
        cache = one.cache_ref()
        is_stretched = cache is not None and cache.batch.stretch is not None
        with self._books.lock:
            least = self._stretching.room_for(tokens) if is_stretched else self._stretching.least(tokens)
            lack = self._lack(one, tokens, least)
            if lack is not None:
                self._books.counters.full += 1
                raise KvFull(lack[0], lack[1], f"a turn of {tokens} tokens")
            blocks = self._books.blocks_for(tokens)
            one.promise = blocks if least is None else self._stretching.windows_for(tokens)
            one.beside = self._beside(one, tokens, stretched=least is not None)[0]
            return least is not None

    def _beside(self, one: Conversation | None, tokens: int, *, stretched: bool) -> tuple[int, int]:
        """Bytes beside its blocks that a turn takes for so many tokens, and those of them that it has."""
        geometry, cache = self._books.geometry, None if one is None else one.cache_ref()
        has = 0
        # Whether its blocks will be consecutive nobody knows before the others have taken theirs.
        need = geometry.side_bytes(tokens) + geometry.gathered_bytes(blocks_of(tokens) * BLOCK, windows=stretched)
        if cache is not None:
            has = cache.batch.side.size + cache.batch.gathers.size
            has += 0 if cache.batch.stretch is None else cache.batch.stretch.staged
        return need, has

    def _lack(self, one: Conversation | None, tokens: int, least: int | None) -> tuple[int, int] | None:
        """Bytes that are needed and that there are; None where all is well."""
        books = self._books
        others = [other for other in books.conversations.values() if other is not one and not other.parked]
        others = [other for other in others if other.active or other.pinned]
        beside, has = self._beside(one, tokens, stretched=least is not None)
        pending = sum(books.pending(other) for other in others)
        need = list(books.amounts(books.blocks_for(tokens)) if least is None else (least,))
        have = list(books.capacity())
        for other in others:
            taken = books.amounts(books.claim(other))
            have = [left - used for left, used in zip(have, taken, strict=True)]
        if books.shares_memory:
            need[0], have[0] = need[0] + beside, have[0] + has - pending
        elif beside - has > books.device.free_beside - pending:
            return beside, max(books.device.free_beside - pending + has, 0)
        if all(want <= left for want, left in zip(need, have, strict=True)):
            return None
        if books.shares_memory:
            return need[0], max(have[0], 0)
        sizes = [group.block_bytes for group in books.geometry.groups]
        worst = max(range(len(need)), key=lambda group: (need[group] - have[group]) * sizes[group])
        return need[worst] * sizes[worst], max(have[worst], 0) * sizes[worst]
