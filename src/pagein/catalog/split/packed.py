"""Weights of linear layers in 8 or 4 bits, as a part's file has them: names, shapes and types. Pure.

In place of ``X.weight`` [N, K] a file has ``X.weight_packed`` and ``X.weight_scales`` (`weights.packed`): I8 [N, K]
with BF16 [N], or U8 [N, K / 2] with BF16 [K / group, N, 2]. Kernels compute from them as they lie, with no question
about their size: so a plan in which they do not fit each other is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagein.catalog.split.plan import PartFile, TensorEntry

PRECISIONS = ("int8", "int4")
"""In files of these precisions weights are packed, and everything else is as stored."""
WEIGHT, PACKED, SCALES = "weight", "weight_packed", "weight_scales"
LAYOUTS = ("halves64", "halves32", "pairs32")
"""How 4-bit codes can stand in bytes; which of them a processor's kernel takes differs."""
GROUPS = (64, 32)
"""Weights of a row that can share a scale and a zero in 4 bits."""


@dataclass(frozen=True, slots=True)
class Packed:
    """One weight [rows, width] that a file has packed."""

    rows: int
    width: int
    bits: int
    group: int | None
    """In 4 bits; 8 bits have one scale for each row."""


def stem_of(name: str) -> str | None:
    """Return what the names of a packed weight begin with (``X.``), or None for the name of another tensor."""
    path, dot, leaf = name.rpartition(".")
    return f"{path}{dot}" if leaf in (PACKED, SCALES) else None


def packed_of(precision: str, file: PartFile) -> dict[str, Packed]:
    """Return the packed weights of a file by the names of the weights; raises ValueError where one is not whole."""
    if precision not in PRECISIONS:
        return {}
    stems = {stem: None for name in file.tensors if (stem := stem_of(name)) is not None}
    found = {f"{stem}{WEIGHT}": _one(stem, file.tensors) for stem in stems}
    four = any(one.bits == 4 for one in found.values())
    if four != (file.layout is not None):
        raise ValueError(f"says {file.layout or 'no layout'!r}, and has {'' if four else 'no '}weights in 4 bits")
    return found


def shapes_of(precision: str, file: PartFile) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return each tensor with the shapes that it can have unpacked: names and shapes are those of every precision.

    A packed weight may have been stored the other way round (Conv1D). Raises ValueError as `packed_of`.
    """
    packed = packed_of(precision, file)
    found = {name: ((one.rows, one.width), (one.width, one.rows)) for name, one in packed.items()}
    plain = {
        name: (one.shape,)
        for name, one in file.tensors.items()
        if (stem := stem_of(name)) is None or f"{stem}{WEIGHT}" not in packed
    }
    return {**plain, **found}


def _one(stem: str, tensors: Mapping[str, TensorEntry]) -> Packed:
    codes, scales = tensors.get(f"{stem}{PACKED}"), tensors.get(f"{stem}{SCALES}")
    if codes is None or scales is None:
        raise ValueError(f"has one of {stem}{PACKED} and {stem}{SCALES}: they belong together")
    if f"{stem}{WEIGHT}" in tensors:
        raise ValueError(f"has {stem}{WEIGHT} twice, packed and as it is")
    if codes.dtype not in ("I8", "U8") or scales.dtype != "BF16" or len(codes.shape) != 2:
        raise ValueError(f"{stem}{PACKED} is {_say(codes)} and {stem}{SCALES} {_say(scales)}: no packed weight")
    rows, side = codes.shape
    if codes.dtype == "I8" and scales.shape == (rows,):
        return Packed(rows, side, 8, None)
    if codes.dtype == "U8":
        for group in GROUPS:
            if 2 * side % group == 0 and scales.shape == (2 * side // group, rows, 2) and rows % 16 == 0:
                return Packed(rows, 2 * side, 4, group)
    raise ValueError(f"{stem}{PACKED} is {_say(codes)}, to which {stem}{SCALES} of {_say(scales)} do not belong")


def _say(tensor: TensorEntry) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"
