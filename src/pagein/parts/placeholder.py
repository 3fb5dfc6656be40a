"""What stands where a cold part's tensors were: names, shapes and types are there, and any use raises `NotResident`.

A bare meta tensor is none: several of torch's CPU kernels take one as a weight and return memory that nobody wrote to,
another request's, say.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import torch
from torch import nn

from pagein.errors import NotResident

_Tensor = torch.Tensor
_GETTERS = (
    "shape", "dtype", "device", "layout", "requires_grad", "is_meta", "is_leaf", "is_sparse", "is_quantized",
    "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_mkldnn", "is_nested", "is_sparse_csr", "ndim", "nbytes", "itemsize",
    "grad", "grad_fn", "_version", "names", "_backward_hooks", "_base", "output_nr", "_grad",
)  # fmt: skip
_METHODS = (
    "size", "dim", "numel", "nelement", "stride", "storage_offset", "element_size", "is_floating_point", "is_complex",
    "is_contiguous", "is_inference", "ndimension", "__len__", "__hash__", "requires_grad_", "get_device", "_is_view",
    "is_signed", "type", "is_pinned", "dim_order", "has_names",
)  # fmt: skip


def _metadata() -> frozenset[Any]:
    """What may be asked of a tensor without its bytes; `_is_view` is Dynamo's, which would hide the error else."""
    found: set[Any] = {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_inference}
    for name in _GETTERS:
        one = getattr(_Tensor, name, None)
        if one is not None and hasattr(one, "__get__"):
            found.add(one.__get__)
    found.update(getattr(_Tensor, name) for name in _METHODS if hasattr(_Tensor, name))
    for name in ("requires_grad", "grad"):
        found.add(getattr(_Tensor, name).__set__)
    return frozenset(found)


_METADATA = _metadata()


class _Cold:
    """Shared by both placeholders; ``_pagein`` is the task and the tensor."""

    _pagein: tuple[str, str]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _METADATA and not (func is _Tensor.type and (len(args) > 1 or kwargs)):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise NotResident(*_named([args, kwargs or {}]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = again(cast(torch.Tensor, self))
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise NotResident(*self._pagein)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        task, tensor = self._pagein
        mine = cast(torch.Tensor, self)
        return f"{type(self).__name__}({tensor!r} of task {task!r}, {tuple(mine.shape)}, {mine.dtype}, not in memory)"


class ColdParameter(_Cold, nn.Parameter):
    """Stands in ``module._parameters``."""


class ColdBuffer(_Cold, torch.Tensor):
    """Stands in ``module._buffers``."""


def placeholder(
    task: str, tensor: str, shape: tuple[int, ...], dtype: torch.dtype, *, parameter: bool, requires_grad: bool = False
) -> torch.Tensor:
    """Return what raises ``NotResident(task, tensor)`` on every use but questions for its metadata."""
    kind = ColdParameter if parameter else ColdBuffer
    with torch.inference_mode(False):
        empty = torch.empty(shape, dtype=dtype, device="meta")
        made: Any = torch.Tensor._make_subclass(kind, empty, requires_grad)
    made._pagein = (task, tensor)
    return cast(torch.Tensor, made)


def again(cold: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return another placeholder for the same tensor, of another dtype where one is given."""
    task, tensor = cast(_Cold, cold)._pagein
    kind = dtype or cold.dtype
    parameter = isinstance(cold, ColdParameter)
    return placeholder(
        task, tensor, tuple(cold.shape), kind, parameter=parameter, requires_grad=bool(cold.requires_grad)
    )


def again_as(cold: torch.Tensor, leaf: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a placeholder for what the same module computes of a tensor that is away."""
    task, tensor = cast(_Cold, cold)._pagein
    return placeholder(task, f"{tensor.rpartition('.')[0]}.{leaf}", shape, dtype, parameter=False)


def is_cold(tensor: object) -> bool:
    """Tell whether this is a placeholder."""
    return isinstance(tensor, _Cold)


def _named(values: Any) -> tuple[str, str]:
    """Find the first placeholder among the arguments of a function."""
    if isinstance(values, _Cold):
        return values._pagein
    inside = values.values() if isinstance(values, dict) else values if isinstance(values, list | tuple) else ()
    for one in inside:
        found = _named(one)
        if found != ("", ""):
            return found
    return "", ""
