"""Weights in 8 and 4 bits, laid out as torch's CPU kernels compute from them: bytes from the disk are used as read.

8 bits: int8 [N, K], symmetric, one scale a row. 4 bits: groups of a row's ``group`` neighbours, each with a scale and a
value for the code 8 (w = (code - 8) * scale + zero), two codes a byte. How codes stand in bytes depends on the
processor's vector width (aten/src/ATen/native/cpu/int4mm_kernel.cpp of torch 2.13): a `Layout` says which it is.
Scales are bf16: codes are chosen for the rounded scale, and both fp32 and the kernels take it without loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

GROUPS = (64, 32)
"""Group sizes that the kernel takes and that are tried in this order: the first that divides the width."""
LEAST_SIDE = 128
"""A matrix with a shorter side stays as it is: it holds few bytes, and quantises worst."""
ROWS_STEP = 16
"""The kernel wants the number of rows to be a multiple of this."""
SHRINKS = (1.0, 0.9, 0.8)
"""Ranges tried, as parts of a group's own. With the refits this takes the root mean square error of SmolLM2's matrices
from 8.4 % of their size to 7.2 %, of Gaussian ones from 9.0 % to 8.4 %, and SmolLM2's perplexity from 32.5 to 28.8
(fp32: 23.2); seven ranges and three refits reached 7.0 % in three times the time, errors weighted by size won nothing.
For 8 bits a row shrinking took 0.904 % to 0.902 %: not done."""
REFITS = 2
"""Least-squares fits of scale and zero to the codes chosen, after each range."""
_AT_ONCE = 2**19
"""Weights quantised at a time: bounds the memory of the search to 16 MiB; three times as fast as 2**21 (24 M/s)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How the codes of ``rows`` rows stand in bytes: for each column the rows' codes, two a byte."""

    rows: int
    halves: bool
    """A byte holds row i and row i + rows / 2; else, and always in a rest of fewer rows, rows 2 i and 2 i + 1."""

    @property
    def name(self) -> str:
        """The name that manifests hold."""
        return f"{'halves' if self.halves else 'pairs'}{self.rows}"


LAYOUTS = {layout.name: layout for layout in (Layout(64, True), Layout(32, True), Layout(32, False))}
"""Of processors with AVX-512, with AVX2, and others."""


@cache
def native_layout() -> Layout | None:
    """Return the layout that this machine's kernel computes from, found by packing a matrix; None without a kernel."""
    codes = (torch.arange(64 * 32, dtype=torch.int32) * 7 % 16).reshape(64, 32)
    try:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    for layout in LAYOUTS.values():
        if torch.equal(pack_codes(codes.to(torch.uint8), layout), packed):
            return layout
    return None


def group_of(width: int, most: int = GROUPS[0]) -> int | None:
    """Return the group size for rows of this width, ``most`` at most; None where none divides it."""
    return next((group for group in GROUPS if group <= most and width % group == 0), None)


def can_pack(rows: int, width: int, bits: int) -> bool:
    """Tell whether a matrix [rows, width] is packed; asked alike when shards are made and when they are loaded."""
    whole = bits == 8 or rows % ROWS_STEP == 0
    return min(rows, width) >= LEAST_SIDE and whole and group_of(width) is not None


def packed_shapes(rows: int, width: int, bits: int, group: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of each tensor that `pack` makes of a weight [rows, width]."""
    if bits == 8:
        return {"weight_packed": ((rows, width), torch.int8), "weight_scales": ((rows,), torch.bfloat16)}
    scales = (width // group, rows, 2)
    return {"weight_packed": ((rows, width // 2), torch.uint8), "weight_scales": (scales, torch.bfloat16)}


def pack(weight: torch.Tensor, bits: int, group: int, layout: Layout | None = None) -> dict[str, torch.Tensor]:
    """Quantise a weight [N, K] of any float dtype to ``weight_packed`` and ``weight_scales`` (`packed_shapes`).

    The search is per group and exact about rounding: of all ranges and refits tried, the least sum of squared errors
    of the values that come out. ValueError for what is not finite or does not divide.
    """
    rows, width = weight.shape
    if bits not in (8, 4) or width % group or (bits == 4 and rows % ROWS_STEP):
        raise ValueError(f"a weight [{rows}, {width}] cannot be packed in {bits} bits and groups of {group}")
    step = max(64, _AT_ONCE // width // 64 * 64)
    parts = [weight[start : start + step] for start in range(0, rows, step)]
    if bits == 8:
        by_row = [_quantise_rows(part.float()) for part in parts]
        return {"weight_packed": torch.cat([p for p, _ in by_row]), "weight_scales": torch.cat([s for _, s in by_row])}
    layout = layout or native_layout() or LAYOUTS["halves64"]
    packed, scales = [], []
    for part in parts:
        codes, pairs = _quantise_groups(part.float(), group)
        packed.append(pack_codes(codes, layout))
        scales.append(pairs)
    return {"weight_packed": torch.cat(packed), "weight_scales": torch.cat(scales, 1)}


def unpack(packed: torch.Tensor, scales: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the weight [N, K] in fp32 that packed tensors stand for; the plain reference of the fast paths."""
    if packed.dtype == torch.int8:
        return packed.float() * scales.float()[:, None]
    codes = unpack_codes(packed, layout).float()
    rows, width = codes.shape
    scale, zero = (part.t()[:, :, None] for part in scales.float().unbind(-1))
    return ((codes.view(rows, scales.shape[0], -1) - 8) * scale + zero).view(rows, width)


def pack_codes(codes: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Lay 4-bit codes, uint8 [N, K], out as bytes [N, K / 2]."""
    rows, width = codes.shape
    whole = rows - rows % layout.rows
    parts = []
    for part, size, halves in ((codes[:whole], layout.rows, layout.halves), (codes[whole:], rows - whole, False)):
        if part.shape[0]:
            split = part.view(-1, 2, size // 2, width) if halves else part.view(-1, size // 2, 2, width).transpose(1, 2)
            parts.append((split[:, 0] | (split[:, 1] << 4)).transpose(1, 2).reshape(-1))
    return torch.cat(parts).view(rows, width // 2)


def unpack_codes(packed: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return the 4-bit codes, uint8 [N, K], of bytes [N, K / 2]."""
    rows, width = packed.shape[0], 2 * packed.shape[1]
    whole = rows - rows % layout.rows
    parts = []
    for part, size, halves in ((packed[:whole], layout.rows, layout.halves), (packed[whole:], rows - whole, False)):
        if part.shape[0]:
            bytes_ = part.reshape(-1, width, size // 2).transpose(1, 2)
            parts.append(torch.stack([bytes_ & 15, bytes_ >> 4], 1 if halves else 2).reshape(-1, width))
    return torch.cat(parts)


def _quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = (weight.abs().amax(1) / 127).bfloat16()
    _check_finite(scale)
    divisor = torch.where(scale == 0, 1.0, scale.float())
    return (weight / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8), scale


def _quantise_groups(weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes uint8 [N, K] and scale and zero bf16 [K / group, N, 2] of least error among those tried."""
    rows, width = weight.shape
    weight = weight.reshape(rows, width // group, group)
    low, high = weight.amin(-1, keepdim=True), weight.amax(-1, keepdim=True)
    _check_finite(low + high)
    least = torch.full_like(low, torch.inf)
    scale, zero = torch.zeros_like(low), torch.zeros_like(low)
    mean, centred = weight.mean(-1, keepdim=True), weight - weight.mean(-1, keepdim=True)
    for shrink in SHRINKS:
        wide = (high - low) * (shrink / 15)
        offset = (high + low) / 2 + wide / 2  # codes -8 to 7 lie half a step below the middle
        for _ in range(1 + REFITS):
            wide, offset = wide.bfloat16().float(), offset.bfloat16().float()
            codes = _codes(weight, wide, offset)
            error = (codes * wide).add_(offset).sub_(weight).square_().sum(-1, keepdim=True)
            better = error < least
            least = torch.where(better, error, least)
            scale, zero = torch.where(better, wide, scale), torch.where(better, offset, zero)
            middle = codes.mean(-1, keepdim=True)
            codes -= middle
            spread = codes.square().sum(-1, keepdim=True).clamp_min_(1e-9)
            wide = (codes * centred).sum(-1, keepdim=True) / spread
            offset = mean - wide * middle
    codes = _codes(weight, scale, zero).add_(8).to(torch.uint8).view(rows, width)
    return codes, torch.cat([scale, zero], -1).transpose(0, 1).bfloat16().contiguous()


def _codes(weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    return ((weight - zero) / torch.where(scale == 0, 1.0, scale)).round_().clamp_(-8, 7)


def _check_finite(values: torch.Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise ValueError("it holds values that are not finite numbers")
