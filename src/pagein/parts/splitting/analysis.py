"""What the analyser found, as it lies in ``split_analysis.json`` until the split is written. Needs no torch.

It names folders of this machine, which a plan never does; so it is not a part of the split, and nothing serves from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from pagein.catalog.split.plan import Saving
from pagein.errors import SplitBroken
from pagein.parts.splitting.rules import Assignment
from pagein.parts.splitting.usage import Group
from pagein.units import format_bytes
from pagein.weights.packed.shards import write_whole

FILE_NAME = "split_analysis.json"
VERSION = 1
_LIMIT = 64 * 1024**2


@dataclass(frozen=True, slots=True)
class Origin:
    """A folder that tensors come from."""

    folder: str
    class_name: str
    """The model's class; of an adapter its kind."""
    files: Mapping[str, str]
    """The sha256 of each file with tensors."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One task: how it is called, and what its sample calls showed."""

    kind: str
    model: str
    """The key of its model."""
    call: str | None
    adapter: str | None
    """The adapter part that its calls bring."""
    samples: int
    touched: int
    """Tensors that any sample used."""
    touched_bytes: int
    sometimes: int
    """Tensors that some samples used, and others did not."""
    compared: int
    """Result tensors that were bit-identical with everything else cold."""
    heads: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Of each module named as a head: tensors used, and all."""
    prompt: str | None = None
    """What a message is put into where the task is served."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """What several folders have in common."""

    tensors: int
    nbytes: int
    """Stored once less for each folder that has it again."""
    apart: int
    """Tensors at the same place, in the same shape, and with other bits."""
    examples: tuple[str, ...] = ()
    """Of those."""


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class Analysis:
    """Everything that the split is made from."""

    models: Mapping[str, Origin]
    """By key; several are one `composed.TaskModels`."""
    adapters: Mapping[str, Origin]
    """By part."""
    adapter_bytes: Mapping[str, int]
    tasks: Mapping[str, TaskFacts]
    assignment: Assignment
    """Of the models' tensors; adapters are beside it."""
    buffers: Mapping[str, str]
    sharing: Sharing
    groups: tuple[Group, ...]
    """The influence matrix, summed up by modules."""
    made: Mapping[str, str]
    version: int = VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all parts' tensors as they are stored."""
        return self.assignment.nbytes + sum(self.adapter_bytes.values())

    @property
    def saves(self) -> dict[str, Saving]:
        """What each task need not load of all parts, adapters included."""
        found: dict[str, Saving] = {}
        for task, saving in self.assignment.saves.items():
            own = self.adapter_bytes.get(self.tasks[task].adapter or "", 0)
            left = saving.nbytes + sum(self.adapter_bytes.values()) - own
            found[task] = Saving(left, round(left / self.nbytes, 6) if self.nbytes else 0.0)
        return found

    def verdict(self) -> list[str]:
        """Say plainly, line by line, what the split is good for, and what is shared and why not more."""
        parts = replace(self.assignment, saves=self.saves, nbytes=self.nbytes)
        lines = parts.verdict()
        if self.adapters:
            size = format_bytes(sum(self.adapter_bytes.values()))
            lines.append(f"adapters: {len(self.adapters)} parts, {size}, beside the weights that they adapt")
        if len(self.models) > 1:
            among = "among each other the parts save nothing: every task needs nearly all of them"
            lines = [among if line.startswith("the split saves nothing") else line for line in lines]
            lines += self._sharing_in_words()
        return lines

    def _sharing_in_words(self) -> list[str]:
        apart, count = self.sharing.apart, len(self.models)
        if not self.sharing.tensors:
            return [f"the {count} models share nothing: no backbone of theirs stayed as it was in fine-tuning"]
        before, now = format_bytes(self.nbytes + self.sharing.nbytes), format_bytes(self.nbytes)
        same = f"{self.sharing.tensors} tensors are bit-identical with another model's and stored once"
        lines = [f"the {count} models took {before} each for itself, together they take {now}: {same}"]
        if apart:
            example = f", {self.sharing.examples[0]!r} for one" if self.sharing.examples else ""
            lines.append(f"{apart} tensors have other bits than their counterparts, so that each is stored{example}")
        return lines

    def parts_of(self, task: str) -> tuple[str, ...]:
        """Return the parts of a task in the order of loading, its adapter last."""
        adapter = self.tasks[task].adapter
        return (*self.assignment.tasks[task], *([adapter] if adapter is not None else []))


@cache
def _adapter() -> TypeAdapter[Analysis]:
    return TypeAdapter(Analysis)


def write_analysis(folder: Path, analysis: Analysis) -> Path:
    """Write the file, whole or not at all, and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    write_whole(path, _adapter().dump_json(analysis, indent=1) + b"\n")
    return path


def read_analysis(path: Path) -> Analysis:
    """Read a file, or that of a folder; raises SplitBroken."""
    file = path / FILE_NAME if path.is_dir() else path
    hint = "make one with: pagein split analyze MODEL --tasks task_mapping.yaml --out DIR"
    try:
        if file.stat().st_size > _LIMIT:
            raise SplitBroken(f"{file} has {file.stat().st_size} bytes, the limit is {_LIMIT}", hint=hint)
        found = _adapter().validate_json(file.read_bytes())
    except FileNotFoundError:
        raise SplitBroken(f"there is no {file}", hint=hint) from None
    except OSError as error:
        raise SplitBroken(f"{file} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise SplitBroken(f"{file} is no analysis: {place}: {first['msg']}", hint=hint) from None
    if found.version != VERSION:
        raise SplitBroken(f"{file} has version {found.version}, this program reads {VERSION}", hint=hint)
    return found
