"""Other bytes for the device tier, between two passes."""

from __future__ import annotations

from pagein.errors import KvFull
from pagein.kv.cache.books import Books
from pagein.kv.cache.leaving import Leaving


def resize(books: Books, leaving: Leaving, memory: int) -> int:
    """Let idle conversations leave until what is in use fits, then move blocks together; returns bytes in use.

    Raises KvFull, with the budget that there was, where turns that run have more. No copy runs meanwhile: ids change.
    """
    device = books.device
    if memory > device.most:
        raise KvFull(memory, device.most, "a larger KV budget than the pool was made for")
    while True:
        with books.gate, books.lock:
            before = device.memory
            beyond = device.resize(max(memory, 1))
            if not beyond:
                return device.used_bytes
            device.resize(before)
            need = [beyond] if books.shares_memory else _blocks(books, memory)
        if not leaving.free(need):
            with books.lock:
                used = device.used_bytes
            raise KvFull(used, memory, "what turns in progress hold")


def _blocks(books: Books, memory: int) -> list[int]:
    """Blocks of each group that have to leave; its share of the budget shrinks with it."""
    share = memory / books.device.memory
    return [max(ground.taken - int(ground.blocks * share), 0) for ground in books.device.grounds]
