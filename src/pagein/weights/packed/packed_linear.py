"""A linear layer that computes from packed weights, wherever their bytes lie."""

from __future__ import annotations

import torch
from torch import nn

from pagein.weights.packed.packed_matmul import packed_matmul
from pagein.weights.packed.packing import Layout, can_pack, group_of, native_layout, packed_shapes, unpack


class PackedLinear(nn.Module):
    """``y = x Wᵀ + b`` with W packed in 8 or 4 bits. For inference only: no gradient passes.

    Its buffers ``weight_packed`` and ``weight_scales`` can be made on ``meta`` and be put into ``_buffers`` later as
    views of any memory; the forward copies neither.
    """

    def __init__(
        self, in_features: int, out_features: int, bits: int, *, bias: bool, group: int | None = None,
        layout: Layout | None = None, dtype: torch.dtype = torch.bfloat16, device: torch.device | str | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.in_features, self.out_features, self.bits = in_features, out_features, bits
        self.group = group or group_of(in_features) or 0
        if bits not in (4, 8) or not self.group or in_features % self.group:
            raise ValueError(f"{bits} bits in groups of {self.group} do not divide rows of {in_features}")
        self.layout = layout or native_layout() or Layout(64, True)
        self.dtype = dtype
        for name, (shape, kind) in packed_shapes(out_features, in_features, bits, self.group).items():
            self.register_buffer(name, torch.empty(shape, dtype=kind, device=device))
        made = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device), requires_grad=False)
        self.register_parameter("bias", made if bias else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x [..., in] times the weight: [..., out] in x's dtype (bf16, fp16 or fp32)."""
        packed, scales = self._buffers["weight_packed"], self._buffers["weight_scales"]
        assert packed is not None
        assert scales is not None
        with torch.no_grad():
            flat = x.reshape(-1, self.in_features)
            out = packed_matmul(flat, packed, scales, self.layout)
            if self.bias is not None:
                out.add_(self.bias)
            return out.view(*x.shape[:-1], self.out_features)

    @property
    def weight(self) -> torch.Tensor:
        """The weight in the model's dtype, computed anew at each access: for the rare code that looks at it."""
        packed, scales = self._buffers["weight_packed"], self._buffers["weight_scales"]
        assert packed is not None
        assert scales is not None
        if packed.device.type == "meta":
            return torch.empty(self.out_features, self.in_features, dtype=self.dtype, device="meta")
        return unpack(packed, scales, self.layout).to(self.dtype)

    def extra_repr(self) -> str:
        """Show sizes and packing, as `nn.Linear` shows its sizes."""
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}, group={self.group}"


def sides(module: nn.Module, bits: int) -> tuple[int, int] | None:
    """Return rows and width of a module that can be packed: `nn.Linear` itself, or the ``Conv1D`` of GPT-2; else None.

    A subclass may compute otherwise. A Conv1D holds its weight the other way round, [width, rows].
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.dim() != 2 or not weight.is_floating_point():
        return None
    if type(module) is nn.Linear:
        rows, width = weight.shape
    elif is_conv1d(module):
        width, rows = weight.shape
    else:
        return None
    return (rows, width) if can_pack(rows, width, bits) else None


def is_conv1d(module: nn.Module) -> bool:
    """Tell transformers' Conv1D, a linear layer with a transposed weight."""
    return type(module).__name__ == "Conv1D" and type(module).__module__.startswith("transformers.")


def packed_like(module: nn.Module, bits: int, layout: Layout | None = None, group: int | None = None) -> PackedLinear:
    """Return the layer on ``meta`` that takes the place of one that `sides` accepts; its bias stays the same tensor."""
    found = sides(module, bits)
    weight = module._parameters.get("weight")
    if found is None or weight is None:
        raise ValueError(f"{type(module).__name__} cannot be packed")
    made = PackedLinear(
        found[1], found[0], bits, bias=False, group=group, layout=layout, dtype=weight.dtype, device="meta"
    )
    made.bias = module._parameters.get("bias")
    made.train(module.training)
    return made
