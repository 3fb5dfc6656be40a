"""What the examples' training scripts share: LoRAs, and heads over an encoder that stays as it is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

RANK, ALPHA = 8, 16
TARGETS = ("q_proj", "v_proj")


class Lora:
    """Low-rank additions to a model's layers, trainable: ``W x + B(A x) · alpha / rank`` (arXiv 2106.09685)."""

    def __init__(self, model: nn.Module, under: str = "") -> None:
        """``under``: where the changed layers' names begin."""
        self.a: dict[str, nn.Parameter] = {}
        self.b: dict[str, nn.Parameter] = {}
        self._hooks: list[Any] = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear) and name.startswith(under) and name.rpartition(".")[2] in TARGETS:
                bound = 1 / math.sqrt(module.in_features)
                self.a[name] = nn.Parameter(torch.empty(RANK, module.in_features).uniform_(-bound, bound))
                self.b[name] = nn.Parameter(torch.zeros(module.out_features, RANK))
                self._hooks.append(module.register_forward_hook(self._adding(name)))

    def _adding(self, name: str) -> Any:
        def add(_module: nn.Module, inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> torch.Tensor:
            return result + (inputs[0] @ self.a[name].T) @ self.b[name].T * (ALPHA / RANK)

        return add

    def parameters(self) -> list[nn.Parameter]:
        """All that is trained."""
        return [*self.a.values(), *self.b.values()]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def save(self, folder: Path, kind: str = "CAUSAL_LM") -> None:
        """Write a folder such as PEFT reads."""
        folder.mkdir(parents=True, exist_ok=True)
        prefix = "base_model.model."
        tensors = {f"{prefix}{name}.lora_A.weight": one.detach().contiguous() for name, one in self.a.items()}
        tensors |= {f"{prefix}{name}.lora_B.weight": one.detach().contiguous() for name, one in self.b.items()}
        save_file(tensors, folder / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "task_type": kind, "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
        config |= {"target_modules": sorted(self.a), "lora_dropout": 0.0}
        (folder / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")


@torch.no_grad()
def reaching(module: nn.Module, call: Callable[[], Any]) -> torch.Tensor:
    """Return the first input that a module has in a call."""
    seen: list[torch.Tensor] = []
    hook = module.register_forward_pre_hook(lambda _module, inputs: seen.append(inputs[0]))
    try:
        call()
    finally:
        hook.remove()
    return seen[0]


def fit(
    head: Callable[[torch.Tensor], torch.Tensor],
    layers: tuple[nn.Linear, ...],
    inputs: torch.Tensor,
    labels: torch.Tensor,
    steps: int,
    penalty: float,
    rate: float = 3e-3,
) -> None:
    """Train ``layers`` of a head, the first of which takes ``inputs`` (samples × width), to name the labels.

    It is trained on inputs of mean 0 and deviation 1; afterwards the first layer itself does that to them. ``penalty``
    is for the squares of the weights: there are more of them than samples.
    """
    mean, deviation = inputs.mean(0), inputs.std(0) + 1e-6
    even = (inputs - mean) / deviation
    trained = [one.requires_grad_(True) for layer in layers for one in layer.parameters()]
    optimizer = torch.optim.Adam(trained, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        squares = sum(layer.weight.square().sum() for layer in layers)
        (nn.functional.cross_entropy(head(even), labels) + penalty * squares).backward()
        optimizer.step()
    with torch.no_grad():
        first = layers[0]
        first.weight.div_(deviation)
        first.bias.sub_(first.weight @ mean)
