"""Admission by blocks: a turn that was promised its blocks can always finish (with the books' lock throughout)."""

from __future__ import annotations

from pagein.errors import KvFull
from pagein.kv.cache.books import Books
from pagein.kv.cache.conversation import Conversation


class Promises:
    """Keeps the sum of what turns may still take within the budget."""

    def __init__(self, books: Books) -> None:
        self._books = books

    def could(self, tokens: int) -> bool:
        """Tell whether one more turn can be admitted, and reach so many tokens whatever the others do."""
        books = self._books
        with books.lock:
            running = sum(one.active and not one.parked for one in books.conversations.values())
            return running < books.settings.active and self._lack(None, tokens) is None

    def make(self, one: Conversation, tokens: int) -> None:
        """Promise a turn the blocks for so many tokens; KvFull, with the former promise kept, where that cannot be."""
        with self._books.lock:
            lack = self._lack(one, tokens)
            if lack is not None:
                self._books.counters.full += 1
                raise KvFull(lack[0], lack[1], f"a turn of {tokens} tokens")
            one.promise = self._books.blocks_for(tokens)

    def _lack(self, one: Conversation | None, tokens: int) -> tuple[int, int] | None:
        """Bytes that are needed and that there are; None where all is well."""
        books = self._books
        need = books.amounts(books.blocks_for(tokens))
        have = list(books.capacity())
        for other in books.conversations.values():
            if other is not one and not other.parked and (other.active or other.pinned):
                taken = books.amounts(self._claim(other))
                have = [left - used for left, used in zip(have, taken, strict=True)]
        if all(want <= left for want, left in zip(need, have, strict=True)):
            return None
        if books.shares_memory:
            return need[0], max(have[0], 0)
        sizes = [group.block_bytes for group in books.geometry.groups]
        worst = max(range(len(need)), key=lambda group: (need[group] - have[group]) * sizes[group])
        return need[worst] * sizes[worst], max(have[worst], 0) * sizes[worst]

    def _claim(self, one: Conversation) -> tuple[int, ...]:
        """Blocks of each group that a turn may count on, or has."""
        row = one.row
        held = [len(chain.blocks) + len(chain.retired) for chain in row.chains] if row is not None else []
        promised = one.promise or (0,) * len(self._books.windows)
        return tuple(max(pair) for pair in zip(promised, held or promised, strict=True))
