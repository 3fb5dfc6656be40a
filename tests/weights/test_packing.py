"""Packing: laid out as torch's kernels compute, and as close to the weight as 8 and 4 bits can be."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

from pagein.weights.packed.packed_matmul import KERNEL_TOKENS, packed_matmul, scratch_bytes
from pagein.weights.packed.packing import (
    LAYOUTS,
    can_pack,
    group_of,
    native_layout,
    pack,
    pack_codes,
    packed_shapes,
    unpack,
    unpack_codes,
)

pytestmark = pytest.mark.torch
SHAPES = [(128, 128), (192, 576), (208, 160), (1024, 256)]


def weight_of(rows: int, width: int) -> torch.Tensor:
    """A Gaussian weight, off zero in places, as trained ones are."""
    torch.manual_seed(rows + width)
    return torch.randn(rows, width) * 0.02 + 0.01 * torch.randn(rows, 1)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square error as a part of what was wanted."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_codes_come_back(rows, width, layout):
    """Every layout gives back exactly the codes that went in, also where the last rows fill no block."""
    codes = torch.randint(0, 16, (rows, width), dtype=torch.uint8)
    packed = pack_codes(codes, layout)
    assert packed.shape == (rows, width // 2)
    assert torch.equal(unpack_codes(packed, layout), codes)


@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_layout_is_the_kernels_own(rows, width):
    """The native layout is byte for byte what torch's own packing makes on this machine."""
    layout = native_layout()
    assert layout is not None
    codes = torch.randint(0, 16, (rows, width), dtype=torch.int32)
    assert torch.equal(
        pack_codes(codes.to(torch.uint8), layout), torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    )


_ELSEWHERE = """
import torch
from pagein.weights.packed.packed_matmul import packed_matmul
from pagein.weights.packed.packing import native_layout, pack, unpack
made = pack(torch.randn(208, 576), 4, 64)
x = torch.randn(3, 576).bfloat16()
exact = x.float() @ unpack(*made.values(), native_layout()).t()
assert (packed_matmul(x, *made.values(), native_layout()).float() - exact).norm() < 0.006 * exact.norm()
print(native_layout().name)
"""


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="needs the wider vectors to differ")
def test_narrower_vectors_have_another_layout():
    """A processor with AVX2 only has another layout: it is found, and computed from."""
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    ended = subprocess.run(
        [sys.executable, "-c", _ELSEWHERE], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.strip() == "halves32"
    assert native_layout().name == "halves64"


@pytest.mark.parametrize(("bits", "most"), [(8, 0.012), (4, 0.09)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_error_is_bounded(rows, width, dtype, bits, most):
    """The weight comes back within 1.2 % at 8 bits and 9 % at 4, from every float dtype, in the shapes promised."""
    weight = weight_of(rows, width).to(dtype)
    group = group_of(width)
    made = pack(weight, bits, group)
    assert {name: (tuple(t.shape), t.dtype) for name, t in made.items()} == packed_shapes(rows, width, bits, group)
    assert relative(unpack(*made.values(), native_layout()), weight) < most


def test_search_beats_the_plain_range():
    """The search of range and refits is closer than spreading the codes over the whole range of each group."""
    weight = weight_of(256, 512)
    grouped = weight.view(256, -1, 64)
    low, step = grouped.amin(-1, keepdim=True), (grouped.amax(-1, keepdim=True) - grouped.amin(-1, keepdim=True)) / 15
    plain = ((grouped - low) / step).round() * step + low
    searched = relative(unpack(*pack(weight, 4, 64).values(), native_layout()), weight)
    assert searched < 0.96 * relative(plain.view_as(weight), weight)


@pytest.mark.parametrize("bits", [8, 4])
def test_constant_and_empty_groups(bits):
    """Groups of one value, zero or not, divide by nothing and come back to the rounding of their scale."""
    weight = torch.zeros(128, 128)
    weight[:, 64:] = 0.5
    weight[5] = 0
    found = unpack(*pack(weight, bits, 64).values(), native_layout())
    assert torch.allclose(found, weight, atol=0.002)
    assert torch.equal(found[5], weight[5])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_infinite_values_are_refused(bits, value):
    """A weight that is not finite is an error, never codes."""
    weight = weight_of(128, 128)
    weight[3, 7] = value
    with pytest.raises(ValueError, match="not finite"):
        pack(weight, bits, 64)


def test_which_matrices_are_packed():
    """Both sides are 128 at least, a group divides the width, and 4 bits want rows by the 16."""
    assert can_pack(128, 576, 4)
    assert group_of(576) == 64
    assert group_of(160) == 32
    assert not can_pack(127, 576, 8)
    assert not can_pack(128, 100, 4)
    assert can_pack(50257, 768, 8)
    assert not can_pack(50257, 768, 4)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 5, 100])
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_product_is_that_of_the_unpacked_weight(rows, width, tokens, dtype, bits):
    """Kernel and dequantised tiles give x times the unpacked weight, to the rounding of bf16."""
    made = pack(weight_of(rows, width), bits, group_of(width))
    x = torch.randn(tokens, width).to(dtype)
    assert (tokens <= KERNEL_TOKENS[bits]) == (tokens < 100)
    product = packed_matmul(x, *made.values(), native_layout())
    assert product.dtype == dtype
    exact = x.float() @ unpack(*made.values(), native_layout()).t()
    assert relative(product, exact) < 0.006


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("tokens", [1, 100])
def test_foreign_layouts_compute_too(tokens, layout):
    """Shards of a machine with other vectors are dequantised: slower, and the same product."""
    made = pack(weight_of(208, 160), 4, 32, layout)
    x = torch.randn(tokens, 160)
    exact = x @ unpack(*made.values(), layout).t()
    assert relative(packed_matmul(x, *made.values(), layout), exact) < 0.006


def test_scratch_is_as_said():
    """The scratch that a thread holds after products of one width is what the plan was told, at most."""
    from pagein.weights.packed.packed_matmul import _scratch

    _scratch.held.clear()
    for bits in (8, 4):
        made = pack(weight_of(208, 576), bits, 64)
        packed_matmul(torch.randn(100, 576), *made.values(), native_layout())
    assert 0 < sum(t.nbytes for t in _scratch.held.values()) <= scratch_bytes(576)


def test_a_device_s_product_of_all_blocks_at_once_is_that_of_one_after_another():
    """One kernel for many blocks writes the same columns."""
    from pagein.weights.packed.packed_matmul import _multiply, _multiply_at_once

    x, weight = torch.randn(5, 64), torch.randn(3, 64, 32)
    single, together = torch.empty(5, 112), torch.empty(5, 112)
    _multiply(x, weight, single[:, 16:])
    _multiply_at_once(x, weight, together[:, 16:])
    assert torch.allclose(single[:, 16:], together[:, 16:], atol=1e-5)
