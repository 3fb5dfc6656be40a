"""How fast weights come out of memory: the bound on computing a token from weights that are there already."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

_EACH = 32 * 1024**2
"""Bytes that a thread copies at once: more than its share of the caches."""
_ROUNDS = 3
_MOST_THREADS = 4


def measure_memory(cores: int) -> float:
    """Return the bytes per second that threads read and write while they copy large blocks; takes about 0.1 s.

    Copying reads as much as it writes, so twice the copied bytes pass. The best of one thread and of one per core, at
    most four, each in three rounds: a busy neighbour only ever makes it less.
    """
    return max(_copied(1), _copied(min(max(cores, 1), _MOST_THREADS)))


def _copied(threads: int) -> float:
    blocks = [(bytearray(_EACH), bytearray(_EACH)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(_ROUNDS):
            begin = perf_counter()
            list(pool.map(_copy, blocks))
            times.append(perf_counter() - begin)
    return 2 * threads * _EACH / min(times)


def _copy(pair: tuple[bytearray, bytearray]) -> None:
    into, source = ((ctypes.c_char * _EACH).from_buffer(block) for block in pair)
    ctypes.memmove(into, source, _EACH)  # a call through ctypes lets the other threads run
