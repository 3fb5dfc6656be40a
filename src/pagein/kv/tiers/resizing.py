"""Other bytes for the device tier, between two passes."""

from __future__ import annotations

from pagein.errors import KvFull
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.leaving import Leaving


def resize(books: Books, leaving: Leaving, memory: int) -> int:
    """Let idle conversations leave until what is in use fits, then move blocks together; returns bytes in use.

    Raises KvFull, with the budget that there was, where turns that run have more. No copy runs meanwhile: ids change.
    """
    device = books.device
    if memory > device.most:
        raise KvFull(memory, device.most, "a larger KV budget than the pool was made for")
    while True:
        with books.gate:
            books.lane.settle()  # what is on its way up lands before blocks move
            with books.lock:
                before = device.memory
                beyond = device.resize(max(memory, 1))
                if not beyond:
                    return device.used_bytes
                device.resize(before)
                need = [beyond] if books.shares_memory else _blocks(books, memory)
        if not leaving.free(need):
            with books.lock:
                raise KvFull(*_numbers(books, memory, need), "what turns in progress hold")


def _blocks(books: Books, memory: int) -> list[int]:
    """Blocks of each group that have to leave; its share of the budget shrinks with it."""
    limits = books.device.split(max(memory, 1))
    return [max(ground.taken - limit, 0) for ground, limit in zip(books.device.grounds, limits, strict=True)]


def _numbers(books: Books, memory: int, need: list[int]) -> tuple[int, int]:
    """Bytes that are held, and that there would be: of the group that lacks the most, where each has its share."""
    if books.shares_memory:
        return books.device.used_bytes, memory
    sizes = [group.block_bytes for group in books.geometry.groups]
    worst = max(range(len(need)), key=lambda group: need[group] * sizes[group])
    return books.device.grounds[worst].taken * sizes[worst], books.device.split(max(memory, 1))[worst] * sizes[worst]
