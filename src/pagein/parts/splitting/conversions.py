"""A part's tensors in another floating type: a file of its own in the plan. `packing` makes those in 8 and 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from pagein.errors import BadUsage, SplitBroken
from pagein.parts.adapters import SCALING
from pagein.parts.splitting.making import Conversion, SourceTensor
from pagein.weights.reading.sources import DTYPES

CASTS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""Precisions that are made by rounding each value, and the type of each."""
_FLOATS = ("F64", "F32", "F16", "BF16")


def conversion(precision: str) -> Conversion:
    """Return how tensors come to a precision; raises BadUsage for others than `CASTS`."""
    if precision not in CASTS:
        raise BadUsage(f"--precision is one of {', '.join(CASTS)}, not {precision[:40]!r}")
    kind = CASTS[precision]

    def convert(name: str, tensor: SourceTensor) -> Mapping[str, SourceTensor]:
        # A LoRA's scaling is one number that the runtime wants exactly; whole numbers have no other precision.
        if tensor.dtype not in _FLOATS or tensor.dtype == kind or name.endswith(f".{SCALING}"):
            return {name: tensor}
        return {name: SourceTensor(kind, tensor.shape, lambda: _cast(name, tensor, kind))}

    return Conversion(precision, "rounded to nearest, ties to even", convert)


def _cast(name: str, tensor: SourceTensor, kind: str) -> Iterable[memoryview]:
    """Yield the bytes of a tensor in another type; raises SplitBroken for values that it cannot hold."""
    left = b""
    step = DTYPES[tensor.dtype].itemsize
    for chunk in tensor.chunks():
        data = left + bytes(chunk)
        whole = len(data) - len(data) % step
        left = data[whole:]
        if whole:
            values = torch.frombuffer(bytearray(data[:whole]), dtype=DTYPES[tensor.dtype])
            cast = values.to(DTYPES[kind])
            if bool((torch.isinf(cast) & torch.isfinite(values)).any()):
                largest = float(values.abs()[torch.isfinite(values)].max())
                most = torch.finfo(DTYPES[kind]).max
                raise SplitBroken(f"{name!r} has the value {largest:g}, {kind} holds at most {most:g}", tensor=name)
            yield memoryview(cast.view(torch.uint8).numpy())
