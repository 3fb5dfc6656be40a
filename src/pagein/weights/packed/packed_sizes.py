"""Which matrices are packed in 8 or 4 bits and how many bytes that takes: the sizes of `packing`, without torch.

A contract test holds both together.
"""

from __future__ import annotations

GROUPS = (64, 32)
"""Weights of a row that share a scale and a zero: the first size that divides the width."""
LEAST_SIDE = 128
"""A matrix with a shorter side stays as it is."""
ROWS_STEP = 16
"""In 4 bits the number of rows is a multiple of this."""
SCALE = 2
"""Bytes of a bf16 scale or zero: one a row in 8 bits, two a group in 4 bits."""


def group_of(width: int) -> int | None:
    """Return the group size for rows of this width; None where none divides it."""
    return next((group for group in GROUPS if width % group == 0), None)


def can_pack(rows: int, width: int, bits: int) -> bool:
    """Tell whether a matrix [rows, width] is packed."""
    return min(rows, width) >= LEAST_SIDE and (bits == 8 or rows % ROWS_STEP == 0) and group_of(width) is not None


def packed_bytes(rows: int, width: int, bits: int) -> int:
    """Return the bytes of a packed matrix [rows, width], which `can_pack`."""
    if bits == 8:
        return rows * (width + SCALE)
    group = group_of(width)
    assert group is not None
    return rows * (width // 2 + width // group * 2 * SCALE)
