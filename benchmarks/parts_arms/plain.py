"""The ways without Pagein: a plain model for each task, all in memory, mapped from files, or read by hooks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import transformers

from parts_arms.ways import Way, generate
from parts_arms.whole import PREFIX, Split, build, fill, into_memory, mapped


class Models:
    """A plain model for each task."""

    def __init__(self, models: dict[str, Any], told: str) -> None:
        self._models, self._told = models, told

    def answer(self, task: str, prompt: list[int], count: int) -> list[int]:
        return generate(self._models[task].generate, prompt, count)

    def told(self) -> dict[str, Any]:
        return {"way": self._told}


def _full(folder: Path) -> Way:
    split = Split.read(folder)
    models = build(split, split.tasks)
    fill(split, models, split.files, into_memory)
    return Models(models, f"transformers {transformers.__version__}, every task in memory")


def _mapped(folder: Path) -> Way:
    split = Split.read(folder)
    models = build(split, split.tasks)
    fill(split, models, split.files, mapped)
    return Models(models, f"transformers {transformers.__version__}, every task mapped from its files")


def _hooks(folder: Path) -> Way:
    """What all tasks share in memory, what is a task's own read from its file by hooks, for each use."""
    split = Split.read(folder)
    models = build(split, split.tasks)
    common = set.intersection(*(set(parts) for parts in split.parts.values()))
    fill(split, models, common, into_memory)
    places = {
        name: {"safetensors_file": str(split.files[part]), "weight_name": stored, "dtype": "bfloat16"}
        for part in split.files
        if part not in common
        for stored in split.names[part]
        for name in split.all_names(stored)
    }
    for task, model in models.items():
        prefix = f"{PREFIX}{split.tasks[task]}."
        index = {name.removeprefix(prefix): place for name, place in places.items() if name.startswith(prefix)}
        accelerate.dispatch_model(model, _device_map(model, index), main_device="cpu", offload_index=index)
    return Models(models, f"accelerate {accelerate.__version__}, hooks that read a task's own blocks from the disk")


def _device_map(model: Any, away: dict[str, Any]) -> dict[str, str]:
    """Module by module where it is: blocks one by one."""
    blocks = [f"model.layers.{number}" for number in range(len(model.model.layers))]
    modules = ["model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *blocks]
    return {one: "disk" if any(name.startswith(f"{one}.") for name in away) else "cpu" for one in modules}


OPENERS: dict[str, Callable[[Path], Way]] = {"full": _full, "mapped": _mapped, "hooks": _hooks}
