"""Lets a part join a split that stands, also while a model serves from it: an adapter, or another version of a part.

Files of the parts that stand are not touched, and the plan is replaced last; a running model takes it up with
`Parts.refresh`. Needs no torch, but for another version of a part that has other precisions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pagein.catalog.safetensors import read_safetensors
from pagein.catalog.split.plan import STORED, Part, Role, SplitPlan, Task
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import SplitBroken
from pagein.parts.splitting.making import Conversion, Making, PartMaking, SourceTensor, source_of
from pagein.parts.splitting.peft import adapter_digest, read_adapter
from pagein.parts.splitting.writing import Step, Written, write_split

Progress = Callable[[Step], None]


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

    Raises BadModelFile, ModelUnsuited, and as `write_split`; then the split is as it was.
    """
    tensors = read_adapter(adapter, part, prefix)
    sources = {f"{part}.{name}": digest for name, digest in adapter_digest(adapter).items()}
    return join(folder, part, tensors, sources, tasks, Role.ADAPTER, replaces, progress)


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
