"""LoRAs and fine-tuned layers that belong to one call: no module has an active adapter, each call brings its own.

An adapter's file has, after its part's name and a slash, ``MODULE.lora_A.weight`` (rank × in), ``MODULE.lora_B.weight``
(out × rank) and ``MODULE.scaling`` (F64, one number), or ``MODULE.LEAF``: a tensor in place of the module's own.
What a LoRA adds is computed as PEFT computes it, operation by operation: ``W x + B(A x) · scaling`` (LoRA, arXiv
2106.09685).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from pagein.errors import PartRefused

A, B, SCALING = "lora_A.weight", "lora_B.weight", "scaling"
SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one LoRA adds to one linear layer."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def add_to(self, result: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        """Return the layer's result with the LoRA's added, in the result's dtype."""
        low = linear(inputs.to(self.a.dtype), self.a)
        return (result + linear(low, self.b) * self.scaling).to(result.dtype)


@dataclass(frozen=True, slots=True)
class Adapter:
    """One adapter part, by the names of the modules that it changes."""

    deltas: Mapping[str, Delta] = field(default_factory=dict)
    stand_ins: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors in place of a module's own, by leaf."""

    @property
    def modules(self) -> set[str]:
        """The names of the modules that it changes."""
        return {*self.deltas, *self.stand_ins}


class Owner:
    """Tells the modules of one model from those of its copies, which belong to nobody."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Owner:
        return Owner()


class Selection:
    """The adapters of one call, in the order of its task's parts."""

    def __init__(self, owner: Owner, task: str, adapters: Iterable[Adapter]) -> None:
        """``owner`` is the model that they are for: another's modules of the same names are none of theirs."""
        self.owner, self.task = owner, task
        self._adapters = tuple(adapters)
        self._twins: dict[tuple[int, str], Any] = {}

    def __bool__(self) -> bool:
        return bool(self._adapters)

    def compute(self, name: str, module: Any, ordinary: type[Any], args: tuple[Any, ...], named: Any) -> Any:
        """Return what a module computes in this call."""
        stand_in = next((one.stand_ins[name] for one in reversed(self._adapters) if name in one.stand_ins), None)
        computing = module if stand_in is None else self._twin(name, module, stand_in)
        result = ordinary.forward(computing, *args, **named)
        for one in self._adapters:
            if name in one.deltas:
                result = one.deltas[name].add_to(result, args[0] if args else named["input"])
        return result

    def _twin(self, name: str, module: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the module with other tensors, for this call alone; everything else of it is shared."""
        key = (id(tensors), name)
        if key not in self._twins:
            twin = copy.copy(module)
            table = {leaf: nn.Parameter(one, requires_grad=False) for leaf, one in tensors.items()}
            twin.__dict__["_parameters"] = {**module._parameters, **table}
            self._twins[key] = twin
        return self._twins[key]


ACTIVE: ContextVar[Selection | None] = ContextVar("pagein_adapters", default=None)
"""The adapters of the call that this thread computes; set around each call and each step of a stream."""


def adapter_of(part: str, tensors: Mapping[str, torch.Tensor], file: str) -> Adapter:
    """Return the adapter that a part's tensors are; raises PartRefused for halves of a LoRA and for foreign names."""
    deltas: dict[str, dict[str, torch.Tensor]] = {}
    stand_ins: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        owner, _, path = name.partition(SEPARATOR)
        ending = next((one for one in (A, B, SCALING) if path.endswith(f".{one}")), None)
        if owner != part or "." not in path:
            raise PartRefused(file, f"has the tensor {name!r}, which is neither the model's nor an adapter's")
        if ending is not None:
            deltas.setdefault(path.removesuffix(f".{ending}"), {})[ending] = tensor
        else:
            module, _, leaf = path.rpartition(".")
            stand_ins.setdefault(module, {})[leaf] = tensor
    return Adapter({name: _delta(name, found, file) for name, found in deltas.items()}, stand_ins)


def _delta(name: str, found: Mapping[str, torch.Tensor], file: str) -> Delta:
    missing = [one for one in (A, B, SCALING) if one not in found]
    if missing:
        raise PartRefused(file, f"has no {name}.{missing[0]}, which belongs to the LoRA of {name}")
    a, b, scaling = found[A], found[B], found[SCALING]
    if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or scaling.numel() != 1:
        why = f"{name}: A {list(a.shape)}, B {list(b.shape)} and scaling {list(scaling.shape)} are no LoRA together"
        raise PartRefused(file, why)
    return Delta(a, b, float(scaling.item()))
