"""What a split will be before a byte of it is written: parts, their tensors, and how each precision is made of them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from pagein.catalog.split.packed import stem_of
from pagein.catalog.split.plan import STORED, Model, Part, Role, Saving, Task
from pagein.catalog.split.reader import DTYPES
from pagein.errors import SplitBroken
from pagein.parts.splitting.rules import Assignment
from pagein.weights.packed.shard_file import PAGE, ShardPlan, Spec
from pagein.weights.reading.checkpoint import Checkpoint, StoredTensor

_CHUNK = 8 * 1024**2
_WRITER = "1"
"""Counted up when the same tensors come to lie otherwise in a file: older files are then made anew."""


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor whose bytes come when they are asked for, each time anew."""

    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]
    chunks: Callable[[], Iterable[bytes | memoryview]]


@dataclass(frozen=True, slots=True)
class Conversion:
    """How tensors come to another precision; the functions are the caller's, so that nothing here needs torch."""

    precision: str
    """One of `plan.PRECISIONS`."""
    signature: str
    """What tells its results from those of other settings or versions: ``group=64 layout=halves64``."""
    convert: Callable[[str, SourceTensor], Mapping[str, SourceTensor]]
    """Name and tensor → what is written in its place, by name. Types and shapes are asked for before any bytes."""
    layout: str | None = None
    """How it lays out codes of 4 bits; the plan says it of files that have some."""


@dataclass(frozen=True, slots=True)
class PartMaking:
    """One part to be written."""

    role: Role
    tensors: tuple[str, ...]
    """Names of the source's tensors."""
    conversions: tuple[Conversion, ...] = ()
    """Precisions beside ``stored``."""
    stored: bool = True
    """Whether it is written as it is, too."""
    replaces: str | None = None


@dataclass(frozen=True, slots=True)
class Making:
    """All that a split is made of; the plan follows from it and from the digests of what was written."""

    model: Model
    sources: Mapping[str, str]
    """The sha256 of each file that the tensors come from."""
    tensors: Mapping[str, SourceTensor]
    tasks: Mapping[str, Task]
    """Which parts each task needs; the parts' own tasks follow from it."""
    parts: Mapping[str, PartMaking]
    standing: Mapping[str, Part] = field(default_factory=dict)
    """Parts of the split that stands in the folder, which stay as they are: an adapter joins, or takes a place."""
    tied: tuple[tuple[str, ...], ...] = ()
    buffers: Mapping[str, str] = field(default_factory=dict)
    untouched: tuple[str, ...] = ()
    saves: Mapping[str, Saving] = field(default_factory=dict)
    made: Mapping[str, str] = field(default_factory=dict)

    @property
    def all(self) -> list[str]:
        """The names of all parts, those that stand and those to be written."""
        return [*self.standing, *self.parts]


@dataclass(frozen=True)
class FileMaking:
    """One file to be written: its bytes but for the tensors' are known."""

    part: str
    precision: str
    specs: tuple[Spec, ...]
    """The tensors in the order of the file, gaps filled."""
    tensors: Mapping[str, SourceTensor]
    header: bytes
    layout: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


def from_rules(
    assignment: Assignment, stored: Container[str], conversions: tuple[Conversion, ...] = ()
) -> dict[str, PartMaking]:
    """Return the parts of an assignment, each also in the given precisions; raises SplitBroken for what is not stored.

    Of tied names the one is taken that ``stored`` has: checkpoints keep any of them.
    """
    twins = {name: group for group in assignment.tied for name in group}

    def name_of(tensor: str) -> str:
        found = next((one for one in (tensor, *twins.get(tensor, ())) if one in stored), None)
        if found is None:
            raise SplitBroken(f"the model's files have no tensor {tensor!r}", tensor=tensor)
        return found

    return {
        name: PartMaking(part.role, tuple(name_of(tensor) for tensor in part.tensors), conversions)
        for name, part in assignment.parts.items()
    }


def lay_out(making: Making) -> list[FileMaking]:
    """Decide every file of a split; raises SplitBroken. Asks conversions for shapes, and no one for bytes."""
    made_of = hashlib.sha256(json.dumps(sorted(making.sources.items())).encode()).hexdigest()
    if twice := set(making.parts).intersection(making.standing):
        raise SplitBroken(f"part {min(twice)!r} stands already and would be written anew; give the new one a name")
    files: list[FileMaking] = []
    for name, part in making.parts.items():
        for precision, signature, tensors in _variants(making, name, part):
            notes = {"format": "pt", "pagein": f"part {_WRITER}: {signature}", "pagein_of": made_of}
            files.append(_file(name, precision, tensors, notes, _layout(part, precision, tensors)))
    return files


def _variants(making: Making, name: str, part: PartMaking) -> Iterator[tuple[str, str, dict[str, SourceTensor]]]:
    missing = [tensor for tensor in part.tensors if tensor not in making.tensors]
    if missing:
        raise SplitBroken(f"part {name!r}: the model has no tensor {missing[0]!r}", part=name, tensor=missing[0])
    if not part.tensors:
        raise SplitBroken(f"part {name!r} has no tensor", part=name)
    if part.stored:
        yield STORED, STORED, {tensor: making.tensors[tensor] for tensor in part.tensors}
    for conversion in part.conversions:
        converted: dict[str, SourceTensor] = {}
        for tensor in part.tensors:
            for result, made in conversion.convert(tensor, making.tensors[tensor]).items():
                if result in converted:
                    raise SplitBroken(f"part {name!r}: {conversion.precision} makes {result!r} of two tensors")
                converted[result] = made
        yield conversion.precision, f"{conversion.precision} {conversion.signature}", converted


def _layout(part: PartMaking, precision: str, tensors: Mapping[str, SourceTensor]) -> str | None:
    if not any(one.dtype == "U8" and stem_of(name) is not None for name, one in tensors.items()):
        return None
    return next((one.layout for one in part.conversions if one.precision == precision), None)


def _file(
    part: str, precision: str, tensors: dict[str, SourceTensor], notes: dict[str, str], layout: str | None
) -> FileMaking:
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise SplitBroken(f"part {part!r}: the tensor {name!r} is {tensor.dtype}, which a part cannot have")
    order = tuple(Spec(name, one.dtype, one.shape) for name, one in tensors.items())
    specs = tuple(ShardPlan(part, order).laid_out())
    return FileMaking(part, precision, specs, tensors, _header(specs, notes), layout)


def _header(specs: Iterable[Spec], notes: Mapping[str, str]) -> bytes:
    """Return the bytes before the tensors, a whole number of pages."""
    body: dict[str, object] = {"__metadata__": dict(notes)}
    end = 0
    for spec in specs:
        body[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [end, end + spec.nbytes]}
        end += spec.nbytes
    text = json.dumps(body, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % PAGE)
    return len(text).to_bytes(8, "little") + text


def checkpoint_tensors(checkpoint: Checkpoint) -> dict[str, SourceTensor]:
    """Return the tensors of an opened checkpoint as a split's source."""
    return {name: source_of(tensor) for name, tensor in checkpoint.tensors.items()}


def source_of(tensor: StoredTensor) -> SourceTensor:
    """Return a tensor of a safetensors file as a source; its bytes are read in pieces of some MiB."""

    def chunks() -> Iterator[bytes]:
        descriptor = os.open(tensor.file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            at, end = tensor.offset, tensor.offset + tensor.nbytes
            while at < end and (chunk := os.pread(descriptor, min(_CHUNK, end - at), at)):
                yield chunk
                at += len(chunk)
        finally:
            os.close(descriptor)

    return SourceTensor(tensor.dtype, tensor.shape, chunks)


def digests(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the sha256 of each file of a checkpoint; reads all of it."""
    found: dict[str, str] = {}
    for path in checkpoint.files:
        with open(path, "rb") as file:
            found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found
