"""Layers that compute from a part's packed weights: the part takes the bytes of its file in memory, and no others.

They stand in the places of the model's own linear layers from the start; their codes and scales come and go as every
tensor of a part does. No gradient passes through them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn, cast

import torch
from torch import nn
from torch.nn.functional import linear

from pagein.catalog.split.kinds import kind_of
from pagein.catalog.split.packed import PACKED, SCALES, WEIGHT, Packed, packed_of
from pagein.catalog.split.plan import SplitPlan
from pagein.errors import ModelUnsuited
from pagein.parts.placeholder import again_as, is_cold
from pagein.weights.packed.packed_linear import PackedLinear, is_conv1d, sides
from pagein.weights.packed.packing import LAYOUTS
from pagein.weights.reading.sources import DTYPES


class PartLinear(PackedLinear):
    """A `PackedLinear` whose bytes may be away, and in whose place an adapter may put a weight of its own."""

    transposed = False
    """It stands in the place of a Conv1D, whose weight is [in, out]."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x times the weight."""
        own = self._parameters.get(WEIGHT)
        if own is None:
            return super().forward(x)
        return linear(x, own.t() if self.transposed else own, self.bias)

    @property
    def weight_shape(self) -> tuple[int, int]:
        """The weight's shape as the model knows it."""
        rows, width = self.out_features, self.in_features
        return (width, rows) if self.transposed else (rows, width)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the model's dtype, computed anew at each access; while it is away its placeholder."""
        own, codes = self._parameters.get(WEIGHT), self._buffers[PACKED]
        if own is not None:
            return own
        if is_cold(codes):
            return again_as(cast(torch.Tensor, codes), WEIGHT, self.weight_shape, self.dtype)
        return super().weight.t() if self.transposed else super().weight

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PartLinear:
        """Change all but the type of the scales, which kernels take in no other: a copy of the model is cast so."""
        scales = self._buffers[SCALES]
        assert scales is not None
        super()._apply(fn, recurse)
        changed = self._buffers[SCALES]
        assert changed is not None
        if changed.dtype != scales.dtype:
            self._buffers[SCALES] = scales.to(changed.device)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> NoReturn:
        raise not_saved()


def not_saved() -> ModelUnsuited:
    """Return the error of what would save packed weights as if they were the model's own."""
    return ModelUnsuited(
        "parts of this model are in 8 or 4 bits, and what could be saved of them are not its true weights",
        hint="load it in another precision, load_parts(..., precision='stored'), and save that",
    )


def pack_layers(model: nn.Module, plan: SplitPlan, forms: Mapping[str, str]) -> frozenset[str]:
    """Put layers for packed weights where a part's chosen file has some; returns the names of all their tensors.

    Raises ModelUnsuited where the model has no linear layer of that size there.
    """
    homes = _homes(model)
    twins = {name: group for group in plan.tied for name in group}
    names: set[str] = set()
    for part in plan.parts.values():
        file, kind = part.file(forms[part.name]), kind_of(part, forms[part.name])
        for weight, one in packed_of(forms[part.name], file).items():
            first: PartLinear | None = None
            for name in twins.get(weight, (weight,)):
                made = _layer(model, homes, part.name, name, one, file.layout)
                made.dtype = DTYPES[kind] if kind is not None else made.dtype
                if first is not None and made is not first:
                    made._buffers.update({leaf: first._buffers[leaf] for leaf in (PACKED, SCALES)})
                first = first or made
                names.update(f"{name.removesuffix(WEIGHT)}{leaf}" for leaf in (PACKED, SCALES))
    return frozenset(names)


_Homes = dict[int, list[tuple[nn.Module, str]]]


def _homes(model: nn.Module) -> _Homes:
    """Return for each module all places where it hangs."""
    found: _Homes = {}
    for parent in model.modules():
        for leaf, child in parent._modules.items():
            found.setdefault(id(child), []).append((parent, leaf))
    return found


def _layer(model: nn.Module, homes: _Homes, part: str, weight: str, one: Packed, layout: str | None) -> PartLinear:
    """Return the layer of a weight, put in its place where that was not done yet."""
    path = weight.removesuffix(f".{WEIGHT}")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        raise ModelUnsuited(f"part {part!r} has {weight!r} packed, the model has no module {path!r}") from None
    kept = LAYOUTS[layout] if layout is not None else None
    if isinstance(module, PartLinear):
        if (module.out_features, module.in_features, module.bits) != (one.rows, one.width, one.bits) or (
            kept is not None and (module.layout, module.group) != (kept, one.group)
        ):
            raise ModelUnsuited(f"part {part!r} has {weight!r} packed otherwise than the part in whose place it stands")
        return module
    if sides(module, one.bits) != (one.rows, one.width) or not homes.get(id(module)):
        why = f"has {weight!r} packed from [{one.rows}, {one.width}], the model has a {_say(module)} there"
        raise ModelUnsuited(f"part {part!r} {why}")
    held = module._parameters[WEIGHT]
    assert held is not None
    made = PartLinear(
        one.width, one.rows, one.bits, bias=False, group=one.group, layout=kept, dtype=held.dtype, device="meta"
    )
    made.bias = module._parameters.get("bias")
    made.transposed = is_conv1d(module)
    made.train(module.training)
    for parent, leaf in homes[id(module)]:
        parent._modules[leaf] = made
    homes[id(made)] = homes.pop(id(module))
    return made


def _say(module: nn.Module) -> str:
    weight = module._parameters.get(WEIGHT)
    turned = " (transposed)" if is_conv1d(module) else ""
    return f"{type(module).__name__}{list(weight.shape) if weight is not None else ''}{turned}"
