"""Where the pieces of a block lie in its slot (pure): each from a page on, so that one can be read alone."""

from __future__ import annotations

from collections.abc import Sequence

PAGE = 4096
"""Bytes; what direct reads want offsets, lengths and addresses to be multiples of."""
_STEPS = 32
"""Sizes of slots between a power of two and the next: at most 1 part in so many of a slot stays empty."""


def padded(length: int) -> int:
    """Bytes that a piece takes in its slot."""
    return -(-length // PAGE) * PAGE


def offsets(lengths: Sequence[int]) -> list[int]:
    """Where each piece begins in the slot, and where the last one ends."""
    found, at = [0], 0
    for length in lengths:
        at += padded(length)
        found.append(at)
    return found


def slot_bytes(lengths: Sequence[int]) -> int:
    """The size of the slot for these pieces: few sizes, so that the slot of one block serves another."""
    total = sum(padded(length) for length in lengths)
    step = max(PAGE, (1 << total.bit_length() - 1) // _STEPS)
    return -(-total // step) * step
