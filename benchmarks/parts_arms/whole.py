"""The eight models as plain transformers has them, what they share in memory once. Of Pagein it knows the files alone.

The files of a split are ordinary safetensors; read here, they give the other ways the same bytes at the same places,
and nothing that any of them would have to read twice.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers
from safetensors import safe_open
from torch import nn

PREFIX = "models."
Reader = Callable[[Path], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Split:
    """What `split_plan.json` says, as far as it is wanted here."""

    folder: Path
    tasks: dict[str, str]
    """Task → the key of its model."""
    parts: dict[str, list[str]]
    """Task → names of its parts."""
    files: dict[str, Path]
    """By part."""
    names: dict[str, list[str]]
    """Of the tensors in each part's file."""
    twins: dict[str, list[str]]
    """All names of a tensor that has several."""

    @classmethod
    def read(cls, folder: Path) -> Split:
        """Read it."""
        plan = json.loads((folder / "split_plan.json").read_text())
        stored = {name: part["files"]["stored"] for name, part in plan["parts"].items()}
        return cls(
            folder,
            {name: task["inputs"]["model"] for name, task in plan["tasks"].items()},
            {name: task["parts"] for name, task in plan["tasks"].items()},
            {name: folder / file["file"] for name, file in stored.items()},
            {name: list(file["tensors"]) for name, file in stored.items()},
            {name: group for group in plan["tied"] for name in group},
        )

    def all_names(self, stored: str) -> list[str]:
        """Every name of a tensor."""
        return self.twins.get(stored, [stored])


def build(split: Split, tasks: Iterable[str]) -> dict[str, Any]:
    """The tasks' models, by task, without a byte of weights."""
    models: dict[str, Any] = {}
    for task in tasks:
        config = transformers.AutoConfig.from_pretrained(split.folder / split.tasks[task], local_files_only=True)
        with accelerate.init_empty_weights(include_buffers=False):
            models[task] = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return models


def fill(split: Split, models: Mapping[str, Any], parts: Iterable[str], read: Reader) -> None:
    """Give the models the weights of some parts."""
    homes = {split.tasks[task]: model for task, model in models.items()}
    for part in parts:
        for stored, values in read(split.files[part]).items():
            parameter = nn.Parameter(
                values
            )  # with a gradient, as from_pretrained has it: torch multiplies otherwise else
            for name in split.all_names(stored):
                key, _, path = name.removeprefix(PREFIX).partition(".")
                if key in homes:
                    module, _, leaf = path.rpartition(".")
                    homes[key].get_submodule(module)._parameters[leaf] = parameter


def into_memory(file: Path) -> Mapping[str, torch.Tensor]:
    """Read a whole file, as a load to any device must.

    Into memory that torch allocates: the library's own begins at any address, from which torch computes more slowly.
    """
    with safe_open(file, framework="pt", backend="pread") as opened:
        return {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118 - it is no dict


def mapped(file: Path) -> Mapping[str, torch.Tensor]:
    """Map a file, as transformers does on a CPU: its pages come when they are first used."""
    with safe_open(file, framework="pt") as opened:
        return dict(opened.get_tensors())
