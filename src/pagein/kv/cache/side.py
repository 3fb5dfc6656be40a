"""State of layers that keep no blocks (recurrent, convolution, index), as bytes: plain values and tensors, no pickle.

Such a state is valid at exactly one length. It is what the layer's object has as attributes, so that layers of models
to come are served, too; one with anything else in it (`SideUnknown`) is never kept, and its conversation computes anew.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import torch

_MAGIC = b"pgside1\n"
_LARGEST_HEADER = 4 * 1024**2
_SHARED = frozenset({"device"})
"""Attributes that are the cache's own business and not the conversation's."""


class SideUnknown(ValueError):
    """A layer's state has something that bytes cannot hold here, or bytes are not a state of these layers."""


def pack_side(layers: Sequence[Any]) -> Any:
    """Return the state of layers as a flat uint8 tensor of host memory."""
    tensors: list[Any] = []
    states = [{"kind": type(layer).__name__, "state": _plain(_state_of(layer), tensors)} for layer in layers]
    header = json.dumps({"layers": states, "tensors": [_describe(one) for one in tensors]}).encode()
    if len(header) > _LARGEST_HEADER:
        raise SideUnknown(f"its description has {len(header)} bytes, the limit is {_LARGEST_HEADER}")
    head = _MAGIC + struct.pack("<I", len(header)) + header
    parts = [torch.frombuffer(bytearray(head), dtype=torch.uint8)]
    parts += [one.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8) for one in tensors if one.numel()]
    return torch.cat(parts)


def unpack_side(flat: Any, layers: Sequence[Any], device: Any) -> None:
    """Give new layers the state that `pack_side` took; raises SideUnknown, with nothing changed, for other bytes."""
    head = len(_MAGIC) + 4
    start = bytes(flat[:head].tolist())
    if start[: len(_MAGIC)] != _MAGIC:
        raise SideUnknown("it is no side state")
    length = struct.unpack("<I", start[len(_MAGIC) :])[0]
    if length > min(_LARGEST_HEADER, flat.numel() - head):
        raise SideUnknown(f"its description has {length} bytes, there are {flat.numel() - head}")
    told = json.loads(bytes(flat[head : head + length].numpy()))
    if [one["kind"] for one in told["layers"]] != [type(layer).__name__ for layer in layers]:
        raise SideUnknown("it is of other layers")
    tensors = _tensors(flat[head + length :], told["tensors"], device)
    states = [_living(one["state"], tensors) for one in told["layers"]]
    for layer, state in zip(layers, states, strict=True):
        for name, value in state.items():
            setattr(layer, name, value)
        if any(isinstance(one, torch.Tensor) for one in _leaves(state)):
            layer.device = torch.device(device)


def side_bytes(layers: Sequence[Any]) -> int:
    """Bytes of all tensors in the layers' states."""
    return sum(
        one.numel() * one.element_size()
        for layer in layers
        for one in _leaves(_state_of(layer))
        if isinstance(one, torch.Tensor)
    )


def _state_of(layer: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(layer).items() if name not in _SHARED}


def _plain(value: Any, tensors: list[Any]) -> Any:
    """A value as JSON can hold it; tensors go to the list."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or isinstance(value, bool | int | float | str):
        return {"value": value}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, dict) and all(isinstance(key, int | str) for key in value):
        return {"dict": [[key, _plain(one, tensors)] for key, one in value.items()]}
    if isinstance(value, list | tuple):
        return {"tuple" if isinstance(value, tuple) else "list": [_plain(one, tensors) for one in value]}
    raise SideUnknown(f"a {type(value).__name__} cannot be kept")


def _living(told: Any, tensors: list[Any]) -> Any:
    (kind, value), *_ = told.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dtype":
        return getattr(torch, value)
    if kind == "dict":
        return {key: _living(one, tensors) for key, one in value}
    if kind in ("list", "tuple"):
        found = [_living(one, tensors) for one in value]
        return tuple(found) if kind == "tuple" else found
    return value


def _describe(tensor: Any) -> dict[str, Any]:
    return {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": list(tensor.shape)}


def _tensors(flat: Any, described: list[dict[str, Any]], device: Any) -> list[Any]:
    found, at = [], 0
    for one in described:
        dtype, shape = getattr(torch, one["dtype"]), one["shape"]
        size = dtype.itemsize
        for extent in shape:
            size *= extent
        if at + size > flat.numel():
            raise SideUnknown(f"it ends at byte {flat.numel()}, a tensor at {at + size}")
        piece = flat[at : at + size].clone().view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
        found.append(piece.to(device))
        at += size
    return found


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for one in value.values() for leaf in _leaves(one)]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    return [value]
