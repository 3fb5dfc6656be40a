"""Several models of one backbone as one module: what is bit-identical between them is one tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pagein.catalog.split.names import fold
from pagein.catalog.split.plan import Model, SplitPlan
from pagein.errors import BadModelFile, UnknownTask
from pagein.parts.building import build_on_meta, config_digest

CLASS_NAME = "TaskModels"
"""What plans name as the class of such a model."""
PREFIX = "models."


class TaskModels(nn.Module):
    """Ordinary models by a key, and which of them each task calls."""

    def __init__(self, models: Mapping[str, nn.Module], tasks: Mapping[str, str]) -> None:
        """``tasks``: task → key."""
        super().__init__()
        self.models = nn.ModuleDict(dict(models))
        self.task_keys = dict(tasks)

    def of(self, task: str) -> Any:
        """Return the ordinary model that a task of a name of any case calls; raises UnknownTask."""
        key = self.task_keys.get(fold(task) or "")
        if key is None:
            raise UnknownTask(task, list(self.task_keys))
        return self.models[key]

    def forward(self, *args: Any, task: str, **kwargs: Any) -> Any:
        """Call the task's model."""
        return self.of(task)(*args, **kwargs)

    def generate(self, *args: Any, task: str, **kwargs: Any) -> Any:
        """Generate with the task's model."""
        return self.of(task).generate(*args, **kwargs)


def build_composed(plan: SplitPlan, folder: Path) -> TaskModels:
    """Return a plan's `TaskModels`, parameters on meta and tied as the plan says; raises ModelUnsuited, BadModelFile.

    Each model's configuration lies in the folder of its key beside the plan.
    """
    keys = sorted({task.inputs["model"] for task in plan.tasks.values() if "model" in task.inputs})
    found = digest_of({key: config_digest(folder / key) for key in keys})
    if found != plan.model.config_digest:
        why = f"the configurations in {', '.join(keys)} have the digest {found}, the plan says"
        raise BadModelFile(f"{folder}: {why} {plan.model.config_digest}")
    models = {key: _build_one(plan, folder, key) for key in keys}
    made = TaskModels(models, {name: task.inputs["model"] for name, task in plan.tasks.items()})
    tie(made, plan.tied)
    made.eval()
    return made


def _build_one(plan: SplitPlan, folder: Path, key: str) -> nn.Module:
    from pagein.catalog.bounded import read_json
    from pagein.catalog.folder import inside
    from pagein.catalog.hf_config import CONFIG_LIMIT

    settings = folder / key
    names = read_json(inside(settings, "config.json"), CONFIG_LIMIT).get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise BadModelFile(f"{settings}: config.json names no class in 'architectures'")
    one = SplitPlan(Model(names[0], config_digest(settings)), plan.sources, plan.tasks, plan.parts)
    model: nn.Module = build_on_meta(one, settings)
    return model


def digest_of(digests: Mapping[str, str]) -> str:
    """Return what a plan has as the digest of several configurations, from the digest of each by its key."""
    lines = [f"{key} {digest}\n" for key, digest in sorted(digests.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def tie(model: nn.Module, groups: Iterable[Iterable[str]]) -> None:
    """Let the names of each group be one tensor, that of the first name."""
    for group in groups:
        first, *others = group
        tensor = tensor_at(model, first)
        for name in others:
            hang(model, name, tensor)


def tensor_at(model: nn.Module, name: str) -> torch.Tensor:
    """Return the parameter or buffer of this name."""
    parent, _, leaf = name.rpartition(".")
    tensor: torch.Tensor = getattr(model.get_submodule(parent), leaf)
    return tensor


def hang(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a tensor in the place of the parameter or buffer of this name."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, tensor)


class Sharing:
    """Makes one tensor of those that are bit for bit the same at the same place in several models.

    The same place: the same name within the backbone, which classes of one family keep under other prefixes. Equal
    bytes at different places are chance (biases of zero), and stay apart.
    """

    def __init__(self) -> None:
        self._firsts: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self.nbytes = 0
        """Bytes that need not be stored again."""
        self.tensors = 0
        """Tensors that another model has already."""
        self.apart: list[str] = []
        """Tensors that another model has at the same place in the same shape, and with other bits."""

    def add(self, key: str, model: nn.Module) -> None:
        """Let a model use what those before it have."""
        done: dict[int, torch.Tensor] = {}
        mine: list[tuple[tuple[object, ...], torch.Tensor]] = []
        short = _short_names(model)
        for name, tensor in list(model.state_dict(keep_vars=True).items()):
            if id(tensor) in done:
                hang(model, name, done[id(tensor)])
                continue
            place: tuple[object, ...] = (short(name), tensor.dtype, tuple(tensor.shape))
            known = self._firsts.get(place, [])
            twin = next((other for other in known if same_bits(tensor, other)), None)
            if twin is None:
                mine.append((place, tensor))
                self.apart += [f"{PREFIX}{key}.{name}"] if known else []
            else:
                hang(model, name, twin)
                self.tensors += 1
                self.nbytes += tensor.nbytes
            done[id(tensor)] = tensor if twin is None else twin
        for place, tensor in mine:
            self._firsts.setdefault(place, []).append(tensor)


def _short_names(model: nn.Module) -> Callable[[str], str]:
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    return lambda name: name.removeprefix(prefix) if len(prefix) > 1 else name


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Tell whether two tensors are the same bit for bit; NaN equals itself, and 0.0 is not -0.0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    a, b = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other))
    return bool(torch.equal(a, b))
