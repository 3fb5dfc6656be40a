"""Fewer bits for KV in the lower tiers: lossy, off by default, its error measured by `error_of`.

Each row of a head (one token's key or value) is scaled on its own, so that one outlier token harms no other: int8 and
fp8 by the row's largest magnitude, int4 by the least and the largest of each 32 numbers (as KIVI, arXiv 2402.02750,
does for values). Every layer's keys and values are a piece of their own, so that layers can come back one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pagein.kv.tiers.settings import Compression

_INT4_RUN = 32
_FP8_MOST = 448.0
"""Largest number of float8_e4m3fn."""


def squeezed_bytes(rows: int, dim: int, kind: Compression) -> int:
    """Bytes of ``rows`` rows of ``dim`` numbers once squeezed."""
    if kind == "int4":
        return rows * ((dim + 1) // 2 + dim // _run(dim) * 4)
    return rows * (dim + 4)


def squeeze(numbers: Any, kind: Compression) -> Any:
    """Return ``numbers`` (…, dim), of any float dtype, as a flat uint8 tensor of `squeezed_bytes`."""
    rows = numbers.reshape(-1, numbers.shape[-1]).float()
    if kind == "int4":
        return _to_int4(rows)
    most = rows.abs().amax(dim=1, keepdim=True)
    if kind == "int8":
        scale = _scale(most / 127)
        packed = (rows / scale).round().clamp(-127, 127).to(torch.int8)
    else:
        scale = _scale(most / _FP8_MOST)
        packed = (rows / scale).clamp(-_FP8_MOST, _FP8_MOST).to(torch.float8_e4m3fn)
    return torch.cat([_bytes(scale), _bytes(packed)])


def unsqueeze(flat: Any, shape: Sequence[int], dtype: Any, kind: Compression) -> Any:
    """Return the numbers again, near what they were, in ``shape`` (…, dim) and ``dtype``."""
    dim = shape[-1]
    count = 1
    for size in shape[:-1]:
        count *= size
    if kind == "int4":
        return _from_int4(flat, count, dim).reshape(*shape).to(dtype)
    scale = _as(flat[: count * 4], torch.float32).reshape(count, 1)
    stored = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    packed = _as(flat[count * 4 : count * (4 + dim)], stored).reshape(count, dim)
    return (packed.float() * scale).reshape(*shape).to(dtype)


@dataclass(frozen=True, slots=True)
class SqueezeError:
    """What squeezing does to numbers, relative to their own size."""

    relative_rms: float
    """Root of the mean squared difference ÷ root of the mean square."""
    largest: float
    """Largest difference ÷ largest magnitude."""
    share: float
    """Bytes after ÷ bytes before."""


def error_of(numbers: Any, kind: Compression) -> SqueezeError:
    """Measure what comes back of ``numbers`` (…, dim) against what went."""
    flat = squeeze(numbers, kind)
    back = unsqueeze(flat, numbers.shape, numbers.dtype, kind).double()
    exact = numbers.double()
    off, size = (back - exact), exact.square().mean().sqrt().clamp(min=1e-30)
    largest = off.abs().max() / exact.abs().max().clamp(min=1e-30)
    share = flat.numel() / (numbers.numel() * numbers.element_size())
    return SqueezeError(float(off.square().mean().sqrt() / size), float(largest), share)


def _to_int4(rows: Any) -> Any:
    count, dim = rows.shape
    runs = rows.reshape(count, -1, _run(dim))
    least, most = runs.amin(dim=2, keepdim=True), runs.amax(dim=2, keepdim=True)
    # Rounded to bfloat16 first, as they are stored: the codes fit the scale that they will be read with.
    base = least.to(torch.bfloat16)
    scale = _scale((most - base.float()).clamp(min=0) / 15).to(torch.bfloat16)
    codes = ((runs - base.float()) / scale.float()).round().clamp(0, 15).to(torch.uint8).reshape(count, dim)
    if dim % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return torch.cat([_bytes(scale), _bytes(base), (codes[:, ::2] | (codes[:, 1::2] << 4)).reshape(-1)])


def _from_int4(flat: Any, count: int, dim: int) -> Any:
    runs, half = dim // _run(dim), (dim + 1) // 2
    end = count * runs * 2
    scale = _as(flat[:end], torch.bfloat16).reshape(count, runs, 1).float()
    base = _as(flat[end : 2 * end], torch.bfloat16).reshape(count, runs, 1).float()
    pairs = flat[2 * end : 2 * end + count * half].reshape(count, half)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=2).reshape(count, half * 2)[:, :dim]
    return (codes.reshape(count, runs, -1).float() * scale + base).reshape(count, dim)


def _run(dim: int) -> int:
    return _INT4_RUN if dim % _INT4_RUN == 0 else dim


def _scale(value: Any) -> Any:
    """A row of zeros has no scale of its own: 1 serves."""
    return torch.where(value > 0, value, torch.ones_like(value))


def _bytes(tensor: Any) -> Any:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _as(flat: Any, dtype: Any) -> Any:
    """Bytes as numbers; copied where they begin where numbers of this kind cannot."""
    return flat.clone().view(dtype)
