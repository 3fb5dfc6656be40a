"""Fewer bits for the lower tiers: sizes, and errors as measured."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from pagein.kv.tiers.squeeze import error_of, squeeze, squeezed_bytes, unsqueeze

BOUNDS = {"int8": 0.01, "fp8": 0.04, "int4": 0.13}
"""Relative root mean square errors on normal numbers that the documentation states."""


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_error_is_bounded(kind: str, dtype: torch.dtype):
    """What comes back is within the stated error, in every dtype, and takes less."""
    torch.manual_seed(0)
    numbers = torch.randn(3, 64, 128).to(dtype)
    error = error_of(numbers, kind)
    assert 0 < error.relative_rms < BOUNDS[kind]
    assert error.share < (0.54 if dtype is not torch.float32 else 0.28)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("dim", [5, 16, 64, 96])
def test_sizes_are_as_told(kind: str, dim: int):
    """The bytes are those that were told before, for odd widths, too, and the shape comes back."""
    numbers = torch.randn(7, dim)
    flat = squeeze(numbers, kind)
    assert flat.dtype is torch.uint8
    assert flat.numel() == squeezed_bytes(7, dim, kind)
    assert unsqueeze(flat, (7, dim), torch.float32, kind).shape == (7, dim)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_outliers_stay_alone(kind: str):
    """One token that is a thousand times larger does not harm its neighbours."""
    torch.manual_seed(0)
    numbers = torch.randn(8, 64)
    before = unsqueeze(squeeze(numbers, kind), numbers.shape, numbers.dtype, kind)[1:]
    numbers[0] *= 1000
    after = unsqueeze(squeeze(numbers, kind), numbers.shape, numbers.dtype, kind)[1:]
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", ["int8", "fp8", "int4"])
def test_zeros_stay_zeros(kind: str):
    """Rows of zeros come back as zeros, never as what is no number."""
    numbers = torch.zeros(4, 32)
    assert torch.equal(unsqueeze(squeeze(numbers, kind), numbers.shape, numbers.dtype, kind), numbers)
