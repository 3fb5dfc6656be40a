"""From the folder of a split model to the catalog's one value, `ModelInfo`. No weight is read."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, fields
from math import prod
from pathlib import Path

from pagein.catalog.bounded import bad
from pagein.catalog.geometry import Geometry
from pagein.catalog.hf_config import read_config, read_traits
from pagein.catalog.model import Format, ModelInfo
from pagein.catalog.split.facts import default_precision, facts_of
from pagein.catalog.split.names import part_of_file
from pagein.catalog.split.plan import PLAN_NAME, PartFile, SplitPlan
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import PartRefused, PlanRefused

SEVERAL = "model"
"""The input by which a task of several models of one backbone names its own; their configurations lie in folders of
these names beside the plan."""
_ANY = ("encoder_decoder", "whole_texts", "position_bias")
"""Traits that cost memory as soon as one of several models has them."""


def is_split(folder: Path) -> bool:
    """Tell whether a folder has a plan, whatever lies under its name: then it is no model of another format."""
    return os.path.lexists(folder / PLAN_NAME)


def is_unfinished(names: Iterable[str]) -> bool:
    """Tell by a folder's file names whether its weights are parts whose plan was never written."""
    weights = [name for name in names if name.endswith(".safetensors")]
    return bool(weights) and all(part_of_file(name) for name in weights)


def describe_split(folder: Path) -> ModelInfo:
    """Read a split model's plan and configurations; raises BadModelFile with the field at fault.

    Files of parts are looked at by name and size alone. A task whose part is missing or damaged is refused when it is
    called, and the others serve on; without its backbone nothing can be served.
    """
    try:
        with PartsRoot(folder) as root:
            plan = read_plan(root)
            away = _away(plan, root)
    except (PlanRefused, PartRefused) as error:
        raise bad(folder, error.message.removeprefix(f"{folder}: "), hint=error.hint, **error.details) from None
    if plan.backbone in away:
        raise bad(folder, f"its backbone cannot be loaded: {away[plan.backbone]}", hint="run 'pagein split check'")
    files = [part.files[default_precision(part.files)] for part in plan.parts.values()]
    shape, traits = _shape(folder, plan)
    return ModelInfo(
        path=folder,
        format=Format.SPLIT,
        files=(folder / PLAN_NAME,),
        file_bytes=sum(file.nbytes for _, _, file in plan.files()),
        weight_bytes=sum(file.nbytes for file in files),
        parameters=sum(prod(tensor.shape) for file in files for tensor in file.tensors.values()),
        **asdict(shape),
        split=facts_of(plan),
        metadata={"class": plan.model.class_name, "bytes_by_type": _by_type(files), "missing": away, **traits},
    )


def _away(plan: SplitPlan, root: PartsRoot) -> dict[str, str]:
    """Return the parts of which no file is there as the plan says, each with why."""
    found: dict[str, str] = {}
    for part in plan.parts.values():
        whys = [why for file in part.files.values() if (why := _fault(root, file)) is not None]
        if len(whys) == len(part.files):
            found[part.name] = whys[0]
    return found


def _fault(root: PartsRoot, file: PartFile) -> str | None:
    try:
        descriptor, _ = root.open(file.file, file.nbytes)
    except PartRefused as error:
        return error.message
    os.close(descriptor)
    return None


def _by_type(files: Iterable[PartFile]) -> dict[str, int]:
    found: dict[str, int] = {}
    for file in files:
        for tensor in file.tensors.values():
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
    return found


def _shape(folder: Path, plan: SplitPlan) -> tuple[Geometry, dict[str, object]]:
    """Return the geometry and traits of the model; of several, whatever takes the most memory of any of them."""
    names = sorted({task.inputs[SEVERAL] for task in plan.tasks.values() if SEVERAL in task.inputs})
    if plan.model.folder is not None and not names:
        names = [plan.model.folder]
    homes = [_under(folder, name) for name in names] or [folder]
    shapes, traits = [read_config(home) for home in homes], [read_traits(home) for home in homes]
    merged = {key: any(each[key] is True for each in traits) for key in _ANY}
    return _largest(shapes), {**traits[0], **merged}


def _under(folder: Path, name: str) -> Path:
    """A folder beside the plan; a plan must not lead out of its own."""
    path = folder / name
    try:
        beside = name not in ("", ".", "..") and "/" not in name and path.resolve().parent == folder.resolve()
    except RuntimeError:  # links in a circle
        beside = False
    if not beside:
        raise bad(folder, f"its plan names the folder {name[:80]!r}, which is not one beside it")
    return path


def _largest(shapes: list[Geometry]) -> Geometry:
    first = shapes[0]
    values: dict[str, object] = {}
    for field in fields(Geometry):
        found = [value for one in shapes if (value := getattr(one, field.name)) is not None]
        numbers = [value for value in found if type(value) is int]
        values[field.name] = max(numbers) if numbers else getattr(first, field.name)
    return Geometry(**values)  # type: ignore[arg-type]
