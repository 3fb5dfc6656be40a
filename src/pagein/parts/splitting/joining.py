"""Lets a part join a split that stands, also while a model serves from it: an adapter, or another version of a part.

Files of the parts that stand are not touched, and the plan is replaced last; a running model takes it up with
`Parts.refresh`. Needs no torch, but for another version of a part that has other precisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pagein.catalog.safetensors import read_safetensors
from pagein.catalog.split.names import PATTERN, is_name
from pagein.catalog.split.plan import STORED, Part, Role, SplitPlan, Task, TensorEntry
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import SplitBroken
from pagein.parts.splitting.making import Conversion, Making, PartMaking, SourceTensor, source_of
from pagein.parts.splitting.peft import adapter_digest, read_adapter
from pagein.parts.splitting.writing import Step, Written, write_split

Progress = Callable[[Step], None]
SEPARATOR = "/"
"""Between a LoRA's part and the layer that a tensor of it adapts."""


def join_adapter(
    folder: Path,
    adapter: Path,
    part: str,
    tasks: Mapping[str, Task],
    *,
    replaces: str | None = None,
    prefix: str = "",
    progress: Progress = lambda step: None,
) -> Written:
    """Write a PEFT LoRA as a part; ``tasks`` are those that are new or need it now, all others stay as they are.

    One that can stand in another's place comes in every precision which that has. Raises BadModelFile, ModelUnsuited,
    SplitBroken where it adapts what the split does not have, and as `write_split`; then the split is as it was.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    tensors = read_adapter(adapter, part, prefix)
    _check_adapts(plan, part, tensors)
    sources = {f"{part}.{name}": digest for name, digest in adapter_digest(adapter).items()}
    conversions = _conversions(plan.part(replaces)) if replaces is not None else ()
    return join(folder, part, tensors, sources, tasks, Role.ADAPTER, replaces, progress, conversions)


def join_replacement(
    folder: Path, source: Path, replaces: str, part: str, *, progress: Progress = lambda step: None
) -> Written:
    """Write what can stand in a part's place: a PEFT folder for a LoRA, a safetensors file for any other part.

    Raises as `join_adapter` and `join_version`, and SplitBroken where the one is given for the other.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    old = plan.part(replaces)
    if not is_name(part):
        raise SplitBroken(f"{part[:80]!r} is no name of a part; one looks like {PATTERN}")
    if part in plan.parts:
        raise SplitBroken(f"there is a part {part!r} already; one that joins needs a name of its own", part=part)
    is_lora = old.role is Role.ADAPTER and any(SEPARATOR in name for name in old.tensor_names())
    if is_lora != source.is_dir():
        wanted = "the folder of a PEFT LoRA" if is_lora else "a safetensors file with the same tensors"
        raise SplitBroken(f"{source} cannot stand for the part {old.name!r}: that takes {wanted}", part=part)
    if is_lora:
        prefix = _prefix(plan, old)
        return join_adapter(folder, source, part, {}, replaces=old.name, prefix=prefix, progress=progress)
    return join_version(folder, source, old.name, part, progress=progress)


def join_version(
    folder: Path, file: Path, replaces: str, part: str, *, progress: Progress = lambda step: None
) -> Written:
    """Write another version of a part, from a safetensors file with the same tensors: a head that was trained further.

    It comes in every precision that the part has, so that it can stand in its place whatever that is used in.
    Raises SplitBroken where names, shapes or types are others than those of the part that it can stand for.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    old = plan.part(replaces)
    entry = old.files.get(STORED)
    if entry is None:
        raise SplitBroken(f"part {old.name!r} has no file as stored, with which a version could be compared")
    found = {one.name: one for one in read_safetensors(file, places=True).tensors or ()}
    for name, one in entry.tensors.items():
        new = found.get(name)
        if new is None or new.shape != one.shape or new.dtype != one.dtype:
            has = "no such tensor" if new is None else f"{new.dtype} {list(new.shape)}"
            why = f"{name!r}: {file.name} has {has}, the part {old.name!r} {one.dtype} {list(one.shape)}"
            raise SplitBroken(f"part {part!r} cannot stand for {old.name!r}: {why}", part=part, tensor=name)
    tensors = {name: source_of(found[name]) for name in entry.tensors}
    with file.open("rb") as opened:
        sources = {f"{part}.{file.name}": hashlib.file_digest(opened, "sha256").hexdigest()}
    role = Role.ADAPTER if old.role is Role.BACKBONE else old.role
    return join(folder, part, tensors, sources, {}, role, old.name, progress, _conversions(old))


def _prefix(plan: SplitPlan, old: Part) -> str:
    """Return what names of the model begin with that a part's tasks call: the model lies in a larger one."""
    while not old.tasks and old.replaces is not None:
        old = plan.parts[old.replaces]
    keys = {plan.tasks[task].inputs.get("model") for task in old.tasks}
    key = keys.pop() if len(keys) == 1 else None
    return "" if key is None else f"models.{key}."


def _check_adapts(plan: SplitPlan, part: str, tensors: Mapping[str, SourceTensor]) -> None:
    """Raise SplitBroken where a LoRA is for a layer that the split does not have, or has in another size."""
    shapes = {name: one.shape for other in plan.parts.values() for name, one in _as_stored(other).items()}
    tied = {name: group[0] for group in plan.tied for name in group}
    for name, tensor in tensors.items():
        layer, adapts, ending = name.removeprefix(f"{part}{SEPARATOR}").rpartition(".lora_")
        if not adapts:
            continue
        weight = f"{layer}.weight"
        shape = shapes.get(weight) or shapes.get(tied.get(weight, weight))
        if shape is None:
            raise SplitBroken(f"part {part!r} adapts {weight!r}, which the split does not have", part=part, tensor=name)
        side = tensor.shape[-1] if ending.startswith("A") else tensor.shape[0]
        if len(tensor.shape) != 2 or side not in shape:
            why = f"{list(tensor.shape)} does not go with {list(shape)} of {weight!r}"
            raise SplitBroken(f"part {part!r}: {name!r} of shape {why}", part=part, tensor=name)


def _as_stored(part: Part) -> Mapping[str, TensorEntry]:
    entry = part.files.get(STORED)
    return entry.tensors if entry is not None else {}


def _conversions(old: Part) -> tuple[Conversion, ...]:
    """Return how a new version comes in the precisions that the part has beside ``stored``."""
    others = [precision for precision in old.files if precision != STORED]
    if not others:
        return ()
    from pagein.parts.splitting.conversions import CASTS, conversion
    from pagein.parts.splitting.packing import packing_like

    return tuple(conversion(one) if one in CASTS else packing_like(old, one) for one in others)


def join(
    folder: Path,
    part: str,
    tensors: Mapping[str, SourceTensor],
    sources: Mapping[str, str],
    tasks: Mapping[str, Task],
    role: Role,
    replaces: str | None = None,
    progress: Progress = lambda step: None,
    conversions: tuple[Conversion, ...] = (),
) -> Written:
    """Write one more part and the plan that has it; raises as `write_split`."""
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    making = PartMaking(role, tuple(tensors), conversions, replaces=replaces)
    return write_split(folder, _with(plan, part, making, tensors, sources, tasks), progress)


def _with(
    plan: SplitPlan,
    part: str,
    making: PartMaking,
    tensors: Mapping[str, SourceTensor],
    sources: Mapping[str, str],
    tasks: Mapping[str, Task],
) -> Making:
    return Making(
        plan.model,
        {**plan.sources, **sources},
        tensors,
        {**plan.tasks, **tasks},
        {part: making},
        plan.parts,
        plan.tied,
        plan.buffers,
        plan.untouched,
        plan.saves,
        plan.made,
    )
