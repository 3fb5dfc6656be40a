"""A net whose layers are large enough to be packed, its split, and what it computes with the same layers packed."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from pagein.catalog.split.plan import Model, Role, SplitPlan, Task
from pagein.parts.splitting.making import Making, PartMaking
from pagein.parts.splitting.packing import matrices, packing
from pagein.parts.splitting.writing import write_split
from pagein.weights.packed.packed_linear import packed_like
from pagein.weights.packed.packing import pack
from tests.parts.served import WORDS, source

WIDTH = 128


class Wide(nn.Module):
    """An embedding with a tied twin, layers of a backbone, one of them transposed, and two heads."""

    def __init__(self, wide: int = 144) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Linear(WIDTH, 256)
        self.back = Conv1D(WIDTH, 256)
        self.square = Conv1D(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, WIDTH)
        self.first = nn.Sequential(nn.Linear(WIDTH, wide), nn.ReLU(), nn.Linear(wide, 3))
        self.second = nn.Linear(WIDTH, 160, bias=False)
        self.words = nn.Linear(WIDTH, WORDS, bias=False)
        self.words.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, task: str) -> Any:
        hidden = self.back(torch.tanh(self.body(self.embed(ids)))) + self.square(self.embed(ids))
        hidden = self.norm(hidden) * torch.sigmoid(self.gate(hidden))
        if task == "first":
            return self.first(hidden)
        if task == "used":
            return functional.linear(hidden, self.second.weight)
        return self.second(hidden) if task == "second" else self.words(hidden)


PARTS = {
    "backbone": ("embed", "body", "back", "square", "norm", "gate"),
    "first": ("first.0", "first.2"),
    "second": ("second",),
}
TASKS = {
    "first": Task("first", ("backbone", "first"), "tokens"),
    "second": Task("second", ("backbone", "second"), "tokens"),
    "used": Task("used", ("backbone", "second"), "tokens"),
    "words": Task("words", ("backbone",), "tokens"),
}


def wide_net(seed: int = 0, wide: int = 144) -> Wide:
    """The whole net; its weights are large enough that other numbers give other answers."""
    torch.manual_seed(seed)
    net = Wide(wide).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(std=0.3)
    return net


def making(whole: nn.Module, precisions: tuple[str, ...] = ("int8", "int4"), **changes: Any) -> Making:
    """What the net's split is made of."""
    state = {name: one for name, one in whole.state_dict().items() if name != "words.weight"}
    conversions = tuple(packing(one, matrices(whole, one)) for one in precisions)
    parts = {
        part: PartMaking(
            Role.BACKBONE if part == "backbone" else Role.SHARED if part == "second" else Role.TASK,
            tuple(name for name in state if name.rpartition(".")[0] in modules),
            conversions,
        )
        for part, modules in PARTS.items()
    }
    body = {"tensors": {name: source(one) for name, one in state.items()}, "tasks": TASKS, "parts": parts}
    tied = (("embed.weight", "words.weight"),)
    model = Model("tests.Wide", hashlib.sha256(b"wide").hexdigest())
    return Making(model, {"wide.safetensors": "ab" * 32}, **{**body, "tied": tied, **changes})


def split_wide(folder: Path, whole: nn.Module, **changes: Any) -> SplitPlan:
    """Write the net's split, by default in 8 and in 4 bits, too."""
    return write_split(folder, making(whole, **changes)).plan


def packed(whole: Any, precision: str) -> Any:
    """A model with its layers packed in memory, by `weights` alone."""
    made = copy.deepcopy(whole)
    for name, one in matrices(whole, precision).items():
        path = name.removesuffix(".weight")
        module = made.get_submodule(path)
        layer = packed_like(module, one.bits)
        weight = module.weight.detach()
        for leaf, tensor in pack(weight.t() if one.transposed else weight, one.bits, layer.group, layer.layout).items():
            layer._buffers[leaf] = tensor
        parent, _, leaf = path.rpartition(".")
        setattr(made.get_submodule(parent), leaf, layer)
    return made.eval()
