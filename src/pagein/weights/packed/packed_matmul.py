"""Products with packed weights: torch's kernels where they are fast, else tiles dequantised into a reused scratch.

Measured on two cores with AMX, torch 2.13, 1536 × 8960, bf16: the 4-bit kernel takes 0.7 ms for one token (10 GB/s of
packed bytes), 2.9 for 16, 9 for 32, 21-26 for 64; dequantising 11.4 ms, with the product 16-18 for 32 and 20-22 for 64
tokens. 8 bits: 0.76 ms for one (18 GB/s), 5.7 for 16, 22 for 64; dequantised 6 for 16, 11 for 48. The kernels' fp16 is
plain code (27 ms for one token at 4 bits), fp32 is fair for 8 bits only (5.8 ms), so that the other cases compute in
bf16 and fp32.
"""

from __future__ import annotations

import threading

import torch

from pagein.weights.packed.packing import Layout, native_layout

KERNEL_TOKENS = {4: 48, 8: 12}
"""Up to so many tokens (rows of activations) the kernel is faster than dequantising."""
WIDE_KERNEL_TOKENS = 2
"""The same for 8 bits with fp16 and fp32 activations, which the kernel takes one by one: 5.8 ms a token."""
TILE_ROWS = 64
"""Rows of a weight that are dequantised at a time on a CPU, so that they stay in the core's cache."""
DEVICE_WEIGHTS = 8 * 1024**2
"""Weights that are dequantised at a time on a device: 56 MiB of scratch, and few kernels a matrix. Not measured yet."""


class _Scratch(threading.local):
    """One set of buffers for each thread: products of two threads never meet in them."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, torch.dtype, torch.device], torch.Tensor] = {}


_scratch = _Scratch()


def packed_matmul(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return x [M, K] times the transpose of a packed weight [N, K]: [M, N] in x's dtype (bf16, fp16 or fp32).

    Weights of 4 bits with few tokens take fp16 and fp32 activations as bf16, whose rounding is a tenth of their own.
    """
    bits = 8 if packed.dtype == torch.int8 else 4
    most = WIDE_KERNEL_TOKENS if bits == 8 and x.dtype != torch.bfloat16 else KERNEL_TOKENS[bits]
    if x.device.type == "cpu" and x.shape[0] <= most and x.is_contiguous():
        if bits == 8:
            return _rows_kernel(x, packed, scales)
        if layout == native_layout():
            group = 2 * packed.shape[1] // scales.shape[0]
            wide = x.to(torch.bfloat16)
            product: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(wide, packed, group, scales)
            return product.to(x.dtype)
    out = x.new_empty((x.shape[0], packed.shape[0]))
    return _by_rows(x, packed, scales, out) if bits == 8 else _by_blocks(x, packed, scales, layout, out)


def scratch_bytes(width: int) -> int:
    """Bytes of scratch that a thread holds for weights of this width on a CPU: codes, fp32, and tiles of rows."""
    return TILE_ROWS * width * (1 + 4 + 2 * 4)


def _rows_kernel(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    wide = x.float() if x.dtype == torch.float16 else x
    product: torch.Tensor = torch.ops.aten._weight_int8pack_mm(wide, packed, scales.to(wide.dtype))
    return product.to(x.dtype)


def _by_rows(x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    rows, width = packed.shape
    tile = 2 * TILE_ROWS if x.device.type == "cpu" else max(DEVICE_WEIGHTS // width, 1)
    for start in range(0, rows, tile):
        part = packed[start : start + tile]
        weight = _take("weight", (part.shape[0], width), x).copy_(part)
        torch.mm(x, weight.t(), out=out[:, start : start + tile])
    return out.mul_(scales.to(x.dtype))


def _by_blocks(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, layout: Layout, out: torch.Tensor
) -> torch.Tensor:
    """Dequantise the layout's blocks as they stand, [K, rows]: that is how a product of x wants them."""
    rows, width, groups = packed.shape[0], x.shape[1], scales.shape[0]
    most = layout.rows if x.device.type == "cpu" else max(DEVICE_WEIGHTS // width, layout.rows)
    start = 0
    while start < rows:
        size = min(layout.rows, rows - start)
        blocks = max(1, min(most, rows - start) // size)
        whole = size == layout.rows
        part = packed[start : start + blocks * size].view(blocks, width, size // 2)
        pairs = scales[:, start : start + blocks * size].view(groups, 1, blocks, size, 2).float()
        weight = _block(part, pairs, layout.halves and whole, x)
        _multiply(x, weight, out[:, start : start + blocks * size])
        start += blocks * size
    return out


def _multiply(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """Write x [M, K] times each block of weight [B, K, rows] to out [M, B * rows]."""
    if x.device.type != "cpu":
        return _multiply_at_once(x, weight, out)
    rows = weight.shape[2]
    for index, block in enumerate(weight):
        torch.mm(x, block, out=out[:, index * rows : (index + 1) * rows])
    return None


def _multiply_at_once(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """The same in one kernel: a device takes longer to start a product than to compute one of so few rows."""
    blocks, _, rows = weight.shape
    out.unflatten(1, (blocks, rows)).copy_(torch.bmm(x.expand(blocks, *x.shape), weight).transpose(0, 1))


def _block(part: torch.Tensor, pairs: torch.Tensor, halves: bool, x: torch.Tensor) -> torch.Tensor:
    """Return blocks [B, K, rows] in x's dtype of their bytes [B, K, rows / 2] and scales [K / group, 1, B, rows, 2]."""
    blocks, width, half = part.shape
    codes = _take("codes", (blocks, width, 2, half) if halves else (blocks, width, half, 2), x, torch.uint8)
    low, high = codes.unbind(2 if halves else 3)
    torch.bitwise_and(part, 15, out=low)
    torch.bitwise_right_shift(part, 4, out=high)
    wide = _take("wide", (blocks, pairs.shape[0], width // pairs.shape[0], 2 * half), x, torch.float32)
    wide.copy_(codes.view_as(wide))
    scale, zero = pairs.permute(4, 2, 0, 1, 3).unbind(0)
    torch.addcmul(zero - 8 * scale, wide, scale, out=wide)
    flat = wide.view(blocks, width, 2 * half)
    return flat if x.dtype == torch.float32 else _take("weight", flat.shape, x).copy_(flat)


def _take(name: str, shape: tuple[int, ...], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return this thread's scratch of a name, grown to the shape: what it held before is of no use any more."""
    key = (name, dtype or like.dtype, like.device)
    held = _scratch.held
    count = torch.Size(shape).numel()
    flat: torch.Tensor | None = held.get(key)
    if flat is None or flat.numel() < count:
        # Made in inference mode it could not be written to outside of it, and callers do both.
        with torch.inference_mode(False):
            flat = held[key] = torch.empty(count, dtype=key[1], device=like.device)
    return flat[:count].view(shape)
