"""Conversations that end for good: removed from every tier, and nothing of them is left that no other one shares."""

from __future__ import annotations

from contextlib import suppress

from pagein.errors import KvBusy
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.mover import Mover
from pagein.kv.tiers.registry import Registry


class Forgetting:
    """Removes idle conversations."""

    def __init__(self, books: Books, below: Below, mover: Mover, registry: Registry) -> None:
        self._books, self._below, self._mover, self._registry = books, below, mover, registry

    def forget(self, name: str, tenant: str) -> None:
        """Remove a conversation (`KvPool.forget`); raises KvBusy while it is in a turn."""
        with self._books.lock:
            one = self._registry.named(name, tenant)
            if one is not None and one.active:
                raise KvBusy(f"conversation {name!r} is in a turn: end it first")
        if one is not None:
            self._let_go(one)
        if self._below.cold is not None:
            if one is None and not self._mover.is_mover:
                self._mover.drain()  # its cache was closed, and what it said may still be on its way to the disk
            self._below.cold.store.forget(name, tenant)

    def thin_out(self, idle: float | None) -> int:
        """Remove those that are idle for longer (`KvPool.thin_out`), but for pinned ones; returns how many."""
        with self._books.lock:
            now = self._books.clock()
            old = [one for one in self._books.conversations.values() if one.idle]
            old = [one for one in old if not one.pinned and (idle is None or now - one.used_at > idle)]
        for one in old:
            with suppress(KvBusy):  # a turn of it has begun meanwhile
                self._let_go(one)
        if self._below.cold is None:
            return len(old)
        return len(self._below.cold.store.gc(max_idle=-1.0 if idle is None else idle))

    def _let_go(self, one: Conversation) -> None:
        """Free what an idle conversation has, in every tier."""
        with self._books.lock:
            while one.moving:
                self._books.news.wait()
            if one.active:
                raise KvBusy(f"conversation {one.name or one.id} is in a turn: end it first")
            cache, one.moving = one.kept, True  # a turn that begins now waits, and finds its cache closed
        try:
            self._remove(one, cache)
        finally:
            with self._books.lock:
                one.moving = False
                self._books.news.notify_all()

    def _remove(self, one: Conversation, cache: TieredCache | None) -> None:
        if one.writing is not None:
            one.writing.call_off()
            one.writing.wait()
        with self._books.lock:
            others = self._registry.keys_beside(one)
            for key, _ in one.links:
                node = self._books.known.get(key)
                if node is not None and key not in others:
                    self._below.forget(node)
        cold = self._below.cold
        if cold is not None and one.tokens:  # of a write that was called off the disk does not know whose it is
            cold.note(one.disk_name, one.root, one.tokens)
            cold.store.forget(one.disk_name, one.tenant)
        if cache is not None:
            cache.close()
