"""Which conversations a pool has, and whose cache is whose."""

from __future__ import annotations

import secrets
import weakref
from collections import deque

from pagein.errors import KvBusy
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.parking import Parking

MOST_IDLE = 1024
"""Conversations without a block on the device that are remembered by name; all are found by their tokens."""


class Registry:
    """Adds and removes conversations; `of` is asked for each call of a cache."""

    def __init__(self, books: Books, parking: Parking) -> None:
        self._books, self._parking = books, parking
        self._of: weakref.WeakKeyDictionary[TieredCache, Conversation] = weakref.WeakKeyDictionary()
        self._gone: deque[int] = deque()
        self._made = 0

    def of(self, cache: TieredCache) -> Conversation:
        """Return a cache's conversation; a fork of one of ours gets a new one, without a name."""
        self.sweep()
        with self._books.lock:
            found = self._of.get(cache)
            return self._add(cache, None) if found is None else found

    def named(self, name: str, tenant: str) -> Conversation | None:
        """Return a conversation by its name (with the lock)."""
        return self._books.names.get((tenant, name))

    def join(self, cache: TieredCache) -> None:
        """Add a new cache's conversation; KvBusy where its name is another cache's."""
        self.sweep()
        name, tenant = cache.name, cache.tenant
        with self._books.lock:
            known = None if name is None else self.named(name, tenant)
            if known is not None and (known.kept is not None or known.cache_ref() is not None):
                raise KvBusy(f"conversation {name!r} has a cache already: `pool.open` returns it")
            one = self._add(cache, name)
            if name is not None:
                self._books.names[tenant, name] = one
            self._forget_oldest()

    def closed(self, cache: TieredCache) -> None:
        """A cache was closed."""
        with self._books.lock:
            one = self._of.pop(cache, None)
            if one is not None:
                self._remove(one)
        if one is not None:
            self._parking.drop(one)

    def sweep(self) -> None:
        """Forget conversations whose caches were dropped, and see to it that their blocks are free."""
        self._books.device.settle()
        while self._gone:
            number = self._gone.popleft()
            with self._books.lock:
                one = self._books.conversations.get(number)
                if one is not None:
                    self._remove(one)
            if one is not None:
                self._parking.drop(one)

    def take_over(self, one: Conversation) -> None:
        """A conversation without a name that goes on where others ended takes their place, also on the disk."""
        if one.name is not None:
            return
        with self._books.lock:
            older = [other for other in self._books.conversations.values() if _continues(one, other)]
            for other in sorted(older, key=lambda other: len(other.tokens)):
                one.stamp = other.stamp
                if other.kept is not None:
                    other.kept.reset()
                other.kept = None
                if other.cache_ref() is None:
                    self._books.conversations.pop(other.id, None)

    def keys_beside(self, one: Conversation) -> set[bytes]:
        """Return the keys of all blocks that other conversations have (with the lock)."""
        others = (other for other in self._books.conversations.values() if other is not one)
        return {key for other in others for key, _ in other.links}

    def _add(self, cache: TieredCache, name: str | None) -> Conversation:
        self._made += 1
        number, gone = self._made, self._gone
        # Called by the garbage collector, wherever a thread is: it takes no lock.
        seen = weakref.ref(cache, lambda _: gone.append(number))
        one = Conversation(number, name, cache.tenant, seen, secrets.token_hex(8))
        self._of[cache] = self._books.conversations[number] = one
        return one

    def _remove(self, one: Conversation) -> None:
        self._books.conversations.pop(one.id, None)
        if one.name is not None and self.named(one.name, one.tenant) is one:
            del self._books.names[one.tenant, one.name]
        cache = one.kept or one.cache_ref()
        if cache is not None:  # whoever goes on with it is a new conversation, that may leave again
            self._of.pop(cache, None)
        one.kept = None

    def _forget_oldest(self) -> None:
        """Records of conversations that have nothing on the device do not pile up."""
        empty = [
            one
            for one in self._books.conversations.values()
            if one.idle and one.kept is not None and not one.kept.batch.length
        ]
        for one in sorted(empty, key=lambda one: one.used_at)[: max(len(empty) - MOST_IDLE, 0)]:
            self._remove(one)


def _continues(one: Conversation, other: Conversation) -> bool:
    """Tell whether a conversation goes on where another one without a name, idle now, ended."""
    if other is one or other.name is not None or not other.idle or other.moving or other.root != one.root:
        return False
    return 0 < len(other.tokens) < len(one.tokens) and one.tokens[: len(other.tokens)] == other.tokens
