"""Which of a model's tensors a call touches, by the tensors' identity: how a module came by them does not matter.

Hooks miss what is used without its module's call (functional use, bare parameters, buffers, tied twins), and symbolic
tracing fails at an ``if``. Two modes see it all: every torch function with its arguments, and every operation below.
A touch is what a cold tensor's placeholder would refuse: asking for a shape or a type is none.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pagein.parts.placeholder import _METADATA


class NamedTensors:
    """A model's stored tensors, parameters and persistent buffers, by every name that each has."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = dict(model.state_dict(keep_vars=True))
        self._names: dict[int, list[str]] = {}
        self._first: dict[tuple[object, ...], int] = {}
        for name, tensor in self.tensors.items():
            # Two tensors over the same bytes are one, too: some classes tie by storage.
            one = self._first.setdefault(_place(tensor), id(tensor))
            self._names.setdefault(one, []).append(name)
            if one != id(tensor):
                self._names[id(tensor)] = self._names[one]
        spans = sorted((tensor.data_ptr(), tensor.nbytes, name) for name, tensor in self.tensors.items())
        self._spans = [span for span in spans if span[0] and span[1]]
        self._starts = [span[0] for span in self._spans]

    @property
    def tied(self) -> list[tuple[str, ...]]:
        """The names of each tensor that has several."""
        found = {names[0]: tuple(names) for names in self._names.values() if len(names) > 1}
        return list(found.values())

    def names_of(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of the tensor that this is, or is a view of; none for what a call computed."""
        names = self._names.get(id(tensor))
        if names is not None:
            return names
        return self._by_bytes(tensor)

    def _by_bytes(self, tensor: torch.Tensor) -> list[str]:
        if tensor.layout != torch.strided or tensor.is_meta or not self._starts:
            return []
        at = tensor.data_ptr()
        index = bisect_right(self._starts, at) - 1
        if index < 0 or not at or at >= self._starts[index] + self._spans[index][1]:
            return []
        return self._names[id(self.tensors[self._spans[index][2]])]


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return (id(tensor),)
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Functions(TorchFunctionMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _METADATA:
            self._seen.add(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    def __init__(self, seen: _Seen) -> None:
        super().__init__()
        self._seen = seen

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._seen.add(args, kwargs)
        return func(*args, **(kwargs or {}))


class _Seen:
    def __init__(self, tensors: NamedTensors) -> None:
        self.names: set[str] = set()
        self._tensors = tensors

    def add(self, args: Any, kwargs: Any) -> None:
        with torch._C.DisableTorchFunction():
            for value in tree_leaves((args, kwargs or {})):
                if isinstance(value, torch.Tensor):
                    self.names.update(self._tensors.names_of(value))


@contextmanager
def watch(tensors: NamedTensors) -> Iterator[set[str]]:
    """Collect the names of all tensors that this thread's calls touch within; tied names come together."""
    seen = _Seen(tensors)
    with _Functions(seen), _Operations(seen):
        yield seen.names
