"""The split model as its class builds it, without a byte of weights: parameters on meta, computed buffers real."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from pagein.catalog.bounded import read_json
from pagein.catalog.folder import inside
from pagein.catalog.hf_config import CONFIG_LIMIT
from pagein.catalog.split.plan import SplitPlan
from pagein.errors import BadModelFile, ModelUnsuited

TASK_MODELS = "TaskModels"
"""What plans name as the class of several models of one backbone (`composed`)."""
Build = Callable[[], nn.Module]
"""Makes the model as if it were loaded whole: the caller's own code, for classes that transformers does not have."""


def build_on_meta(plan: SplitPlan, folder: Path, build: Build | None = None) -> Any:
    """Return the plan's model in eval mode; raises ModelUnsuited, BadModelFile.

    A plan never makes code run: its class is one of transformers', or ``build`` makes the model.
    """
    if build is None and plan.model.class_name == TASK_MODELS:
        from pagein.parts.composed import build_composed

        return build_composed(plan, folder)
    if build is None:
        settings = folder if plan.model.folder is None else folder / plan.model.folder
        with parameters_on_meta():
            model = _of_transformers(plan, settings)
        _settle_generation(model, settings)
    else:
        with parameters_on_meta():
            model = build()
        found = type(model).__name__
        if found != plan.model.class_name.rpartition(".")[2]:
            raise ModelUnsuited(f"the split was made of {plan.model.class_name}, `build` makes a {found}")
    return model.eval()


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let modules that this thread makes have their parameters on meta; buffers are computed as ever.

    Each parameter is real until its module takes it, so that no more than one of them is in memory.
    """
    thread = threading.get_ident()

    def take(module: nn.Module, name: str, parameter: Any) -> Any:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        empty: Any = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        empty._is_hf_initialized = True  # transformers' own mark: it would make up values for each, for nothing
        return empty

    handle = register_module_parameter_registration_hook(take)
    try:
        yield
    finally:
        handle.remove()


def config_digest(folder: Path) -> str:
    """Return the sha256 of a folder's ``config.json``, as a plan names it."""
    return hashlib.sha256(inside(folder, "config.json").read_bytes()).hexdigest()


def _of_transformers(plan: SplitPlan, settings: Path) -> Any:
    import transformers

    path = settings / "config.json"
    if not path.is_file():
        raise ModelUnsuited(
            f"{settings} has no config.json for the class {plan.model.class_name}",
            hint="give `build`, a function that makes the model, where its class is your own",
        )
    body = read_json(inside(settings, path.name), CONFIG_LIMIT)
    digest = config_digest(settings)
    if digest != plan.model.config_digest:
        raise BadModelFile(f"{path}: has the digest {digest}, the plan says {plan.model.config_digest}")
    if "auto_map" in body:
        raise ModelUnsuited(f"{path}: the model brings code of its own (auto_map), which is never run")
    name = plan.model.class_name.rpartition(".")[2]
    found = getattr(transformers, name, None)
    if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
        raise ModelUnsuited(f"transformers {transformers.__version__} has no model class {name}")
    config = transformers.AutoConfig.from_pretrained(settings, local_files_only=True)
    return cast(Any, found)._from_config(config, dtype=getattr(config, "dtype", None) or torch.float32)


def _settle_generation(model: Any, settings: Path) -> None:
    """Give the model its folder's settings of generation."""
    if getattr(model, "generation_config", None) is not None and (settings / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(settings, local_files_only=True)
