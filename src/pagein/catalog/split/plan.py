"""What a split model is: its tasks, its parts, the files of each part, and their tensors. Pure; names no path.

``split_plan.json`` is the canonical text of a `SplitPlan`, written last; without it a folder holds no split model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from pagein.catalog.split.names import fold
from pagein.errors import UnknownPart, UnknownTask

VERSION = 1
PLAN_NAME = "split_plan.json"
STORED = "stored"
MESSAGE = "{text}"
"""Stands in a task's prompt for what is asked, once."""
PRECISIONS = (STORED, "fp32", "bf16", "fp16", "int8", "int4")
"""In which form a part's tensors lie in a file; ``stored`` is bit for bit as in the checkpoint."""


class Role(StrEnum):
    """What a part is to the tasks."""

    BACKBONE = "backbone"
    """Every task needs it, or no rule lets it leave."""
    TASK = "task"
    """One task's own."""
    SHARED = "shared"
    """Needed by several tasks, and not by all."""
    ADAPTER = "adapter"
    """Added to the others' weights (LoRA) or in place of them (a fine-tuned head)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file must have it."""

    shape: tuple[int, ...]
    dtype: str
    """By the format's name: ``F32``, ``BF16``, …"""
    nbytes: int


@dataclass(frozen=True, slots=True)
class PartFile:
    """One file of a part: its name follows from its content."""

    file: str
    nbytes: int
    sha256: str
    """Of the whole file, 64 hex digits."""
    tensors: Mapping[str, TensorEntry]
    """In the order of the file."""
    layout: str | None = None
    """How codes of 4 bits stand in its bytes, one of `packed.LAYOUTS`; None where it has none."""


@dataclass(frozen=True, slots=True)
class Part:
    """The unit that is loaded and evicted."""

    name: str
    role: Role
    tasks: tuple[str, ...]
    """Whose calls need it, sorted."""
    files: Mapping[str, PartFile]
    """By precision."""
    replaces: str | None = None
    """The part in whose place this one can stand."""

    def file(self, precision: str) -> PartFile:
        """Return the file of a precision; raises UnknownPart."""
        found = self.files.get(precision)
        if found is None:
            raise UnknownPart(precision, list(self.files), f"precision of part {self.name!r}")
        return found

    def tensor_names(self) -> set[str]:
        """The names of its tensors in all precisions."""
        return {name for file in self.files.values() for name in file.tensors}


@dataclass(frozen=True, slots=True)
class Task:
    """One capability of the model."""

    name: str
    parts: tuple[str, ...]
    """What a call needs, in the order in which it is loaded."""
    kind: str
    """How the task is called: generate, classify, tokens, embed, …"""
    inputs: Mapping[str, str] = field(default_factory=dict)
    prompt: str | None = None
    """Of kind ``generate``: what a message is put into, in the place of `MESSAGE`."""


@dataclass(frozen=True, slots=True)
class Model:
    """The model that was split."""

    class_name: str
    config_digest: str
    folder: str | None = None
    """The folder beside the plan with its configuration and tokenizer, a plain name; None where they lie beside it."""


@dataclass(frozen=True, slots=True)
class Saving:
    """What a task need not load of the whole model."""

    nbytes: int
    share: float
    """0 to 1, of the bytes of all parts."""


@dataclass(frozen=True)
class SplitPlan:
    """All of a split model; made by `reader` or `parts.splitting.writing`, which check it."""

    model: Model
    sources: Mapping[str, str]
    """The sha256 of each file that it was made of, by the file's name."""
    tasks: Mapping[str, Task]
    parts: Mapping[str, Part]
    tied: tuple[tuple[str, ...], ...] = ()
    """Names of one and the same tensor; only one of each group is stored."""
    buffers: Mapping[str, str] = field(default_factory=dict)
    """Buffers that no file has, and how each is made."""
    untouched: tuple[str, ...] = ()
    """Tensors that no task was seen to use; they are in the backbone."""
    saves: Mapping[str, Saving] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)
    """The versions it was made with."""

    def task(self, name: object) -> Task:
        """Return the task of a name of any case; raises UnknownTask."""
        folded = fold(name)
        found = self.tasks.get(folded) if folded is not None else None
        if found is None:
            raise UnknownTask(name, list(self.tasks))
        return found

    def part(self, name: object) -> Part:
        """Return the part of a name of any case; raises UnknownPart."""
        folded = fold(name)
        found = self.parts.get(folded) if folded is not None else None
        if found is None:
            raise UnknownPart(name, list(self.parts))
        return found

    def files(self) -> Iterator[tuple[Part, str, PartFile]]:
        """Yield every file: part, precision, entry."""
        for part in self.parts.values():
            for precision, entry in part.files.items():
                yield part, precision, entry

    @property
    def backbone(self) -> str | None:
        """The name of the part that all tasks need."""
        return next((name for name, part in self.parts.items() if part.role is Role.BACKBONE), None)

    @property
    def digest(self) -> str:
        """The sha256 of the plan's canonical text: what a signature or a client can name."""
        return hashlib.sha256(encode(self)).hexdigest()


def encode(plan: SplitPlan) -> bytes:
    """Return the canonical text of a plan: the same plan is always the same bytes."""
    body = {
        "version": VERSION,
        "model": _model(plan.model),
        "source": {"files": _sorted(plan.sources)},
        "tasks": {name: _task(plan.tasks[name]) for name in sorted(plan.tasks)},
        "parts": {name: _part(plan.parts[name]) for name in sorted(plan.parts)},
        "tied": [list(group) for group in plan.tied],
        "buffers": _sorted(plan.buffers),
        "untouched": list(plan.untouched),
        "saves": {name: {"bytes": one.nbytes, "share": one.share} for name, one in sorted(plan.saves.items())},
        "made": _sorted(plan.made),
    }
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _model(model: Model) -> dict[str, object]:
    body: dict[str, object] = {"class": model.class_name, "config_digest": model.config_digest}
    return body if model.folder is None else {**body, "folder": model.folder}


def _task(task: Task) -> dict[str, object]:
    body: dict[str, object] = {"parts": list(task.parts), "kind": task.kind}
    body |= {"inputs": _sorted(task.inputs)} if task.inputs else {}
    return body if task.prompt is None else {**body, "prompt": task.prompt}


def _part(part: Part) -> dict[str, object]:
    files = {precision: _file(entry) for precision, entry in sorted(part.files.items())}
    body: dict[str, object] = {"role": part.role.value, "tasks": sorted(part.tasks), "files": files}
    return body if part.replaces is None else {**body, "replaces": part.replaces}


def _file(entry: PartFile) -> dict[str, object]:
    tensors = {
        name: {"shape": list(one.shape), "dtype": one.dtype, "bytes": one.nbytes} for name, one in entry.tensors.items()
    }
    body: dict[str, object] = {"file": entry.file, "bytes": entry.nbytes, "sha256": entry.sha256, "tensors": tensors}
    return body if entry.layout is None else {**body, "layout": entry.layout}


def _sorted(texts: Mapping[str, str]) -> dict[str, str]:
    return dict(sorted(texts.items()))
