"""A tensor of experts that is not in memory: it hands out one expert's matrix at a time.

It takes the place of a parameter [experts, rows, columns] and knows the few things that transformers' implementations
of experts do with one: index it by an expert (``eager``), index it by the expert of every token (``batched_mm``),
multiply groups of rows with it (``grouped_mm``). On a CPU torch's own grouped product is one product per group too, so
that the bits are equal.
Whatever else computes with it is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from pagein.errors import ModelUnsuited
from pagein.weights.routed.expert_cache import Pool


class RoutedTensor(torch.Tensor):
    """Stands in for all experts of one tensor of one block; on ``meta``, with the tensor's shape and dtype."""

    _pool: Pool
    _block: int
    _turned: bool
    _twin: RoutedTensor
    handlers: ClassVar[dict[str, Callable[..., Any]]] = {}
    """What can be done with it, by the name of torch's function."""

    @classmethod
    def stand_in(cls, placeholder: torch.Tensor, pool: Pool, block: int) -> RoutedTensor:
        """Return a stand-in for the experts of one of the blocks of a pool."""
        pair: list[RoutedTensor] = []
        for turned in (False, True):
            like = placeholder.detach().transpose(-2, -1) if turned else placeholder.detach()
            one: RoutedTensor = torch.Tensor._make_subclass(cls, like)
            one._pool, one._block, one._turned = pool, block, turned
            pair.append(one)
        pair[0]._twin, pair[1]._twin = pair[1], pair[0]
        return pair[0]

    def matrix(self, expert: int) -> torch.Tensor:
        """Return an expert's matrix [rows, columns]; it stays until the next one is asked for."""
        found = self._pool.take(self._block, expert)
        return found.t() if self._turned else found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answer what torch is asked to do with a stand-in."""
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if (handler := cls.handlers.get(name)) is not None:
            return handler(*args, **named)
        with torch._C.DisableTorchFunctionSubclass():
            if any(isinstance(arg, torch.Tensor) and not arg.is_meta for arg in (*args, *named.values())):
                raise ModelUnsuited(
                    f"the model computes with all experts at once ({name}), but only those with tokens are read",
                    hint="choose another implementation: model.set_experts_implementation('grouped_mm')",
                )
            return func(*args, **named)


def _at(routed: RoutedTensor, index: Any) -> torch.Tensor:
    if isinstance(index, torch.Tensor) and index.dim():
        rows = [routed.matrix(expert).clone() for expert in index.flatten().tolist()]
        return torch.stack(rows).view(*index.shape, *routed.shape[1:])
    return routed.matrix(index.__index__())


def _transposed(routed: RoutedTensor, first: int, second: int) -> RoutedTensor:
    if {first % 3, second % 3} != {1, 2}:
        raise ModelUnsuited(
            f"the model swaps dimensions {first} and {second} of its experts, which are read one by one"
        )
    return routed._twin


def _grouped(
    rows: torch.Tensor, routed: RoutedTensor, offs: torch.Tensor, bias: None = None, out_dtype: None = None
) -> torch.Tensor:
    """Multiply rows [n, k], sorted by expert, with each one's [k, m] → [n, m]; rows of expert e end at offs[e]."""
    if bias is not None or out_dtype is not None:
        raise ModelUnsuited(
            "the model asks for a grouped product with a bias or in another dtype, which is unknown here"
        )
    out = torch.empty(rows.shape[0], routed.shape[-1], dtype=rows.dtype, device=rows.device)
    begin = 0
    for expert, end in enumerate(offs.tolist()):
        if end > begin:
            torch.mm(rows[begin:end], routed.matrix(expert), out=out[begin:end])
            begin = end
    return out


RoutedTensor.handlers.update(
    {
        "__getitem__": _at,
        "transpose": _transposed,
        "grouped_mm": _grouped,
        "_grouped_mm": _grouped,
        "grouped_mm_fallback": _grouped,  # transformers' own, for a torch without one
    }
)
