"""The sizes of packed weights without torch are those of the packing itself."""

from __future__ import annotations

import pytest

from pagein.weights.packed import packed_sizes


def test_bytes_of_packed_matrices():
    """A byte a weight and a scale a row; half a byte a weight and two scales a group of 64, of 32 where 64 fails."""
    assert packed_sizes.packed_bytes(128, 256, 8) == 128 * (256 + 2)
    assert packed_sizes.packed_bytes(128, 256, 4) == 128 * (128 + 4 * 4)
    assert packed_sizes.packed_bytes(128, 160, 4) == 128 * (80 + 5 * 4)


@pytest.mark.torch
@pytest.mark.parametrize("bits", [4, 8])
def test_the_packing_agrees(bits):
    """Which matrices are packed, in what groups and how many bytes, is the same in `packing`."""
    torch = pytest.importorskip("torch")
    from pagein.weights.packed import packing

    assert torch is not None
    packed = 0
    for rows in (16, 127, 128, 136, 144, 1000, 4096):
        for width in (64, 128, 160, 200, 256, 4096):
            assert packed_sizes.group_of(width) == packing.group_of(width)
            assert packed_sizes.can_pack(rows, width, bits) == packing.can_pack(rows, width, bits)
            if not packing.can_pack(rows, width, bits):
                continue
            packed += 1
            shapes = packing.packed_shapes(rows, width, bits, packing.group_of(width) or 0)
            made = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in shapes.values()]
            assert packed_sizes.packed_bytes(rows, width, bits) == sum(t.numel() * t.element_size() for t in made)
    assert packed
