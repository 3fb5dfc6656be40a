"""Lets a part join a split that stands, also while a model serves from it: an adapter, or another version of a part.

Files of the parts that stand are not touched, and the plan is replaced last; a running model takes it up with
`Parts.refresh`. Needs no torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pagein.catalog.safetensors import read_safetensors
from pagein.errors import SplitBroken
from pagein.parts.making import Making, PartMaking, SourceTensor, source_of
from pagein.parts.peft import adapter_digest, read_adapter
from pagein.parts.plan import Role, SplitPlan, Task
from pagein.parts.root import PartsRoot, read_plan
from pagein.parts.writing import Step, Written, write_split

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

    Raises SplitBroken where names, shapes or types are others than those of the part that it can stand for.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    old = plan.part(replaces)
    entry = next(iter(old.files.values()))
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
    return join(folder, part, tensors, sources, {}, role, old.name, progress)


def join(
    folder: Path,
    part: str,
    tensors: Mapping[str, SourceTensor],
    sources: Mapping[str, str],
    tasks: Mapping[str, Task],
    role: Role,
    replaces: str | None = None,
    progress: Progress = lambda step: None,
) -> Written:
    """Write one more part and the plan that has it; raises as `write_split`."""
    with PartsRoot(folder) as root:
        plan = read_plan(root)
    return write_split(folder, _with(plan, part, tensors, sources, tasks, role, replaces), progress)


def _with(
    plan: SplitPlan,
    part: str,
    tensors: Mapping[str, SourceTensor],
    sources: Mapping[str, str],
    tasks: Mapping[str, Task],
    role: Role,
    replaces: str | None,
) -> Making:
    return Making(
        plan.model,
        {**plan.sources, **sources},
        tensors,
        {**plan.tasks, **tasks},
        {part: PartMaking(role, tuple(tensors), replaces=replaces)},
        plan.parts,
        plan.tied,
        plan.buffers,
        plan.untouched,
        plan.saves,
        plan.made,
    )
