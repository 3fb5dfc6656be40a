"""What the daemon knows of a split model without a worker: its tasks and parts, by name, kind and size. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagein.catalog.split.kinds import kind_of
from pagein.catalog.split.names import fold
from pagein.catalog.split.plan import STORED, Part, SplitPlan
from pagein.errors import UnknownPart, UnknownTask
from pagein.protocol import Capability

KIND_CAPABILITIES: dict[str, frozenset[Capability]] = {
    "generate": frozenset({Capability.CHAT, Capability.COMPLETION}),
    "classify": frozenset({Capability.TEXT_CLASSIFICATION}),
    "tokens": frozenset({Capability.TOKEN_CLASSIFICATION}),
    "embed": frozenset({Capability.EMBEDDING}),
}
"""What a task of each kind can be asked for. A task of another kind (``call``) is for programs that load the model as a
library: it is listed, and not served."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One task of a split model."""

    kind: str
    parts: tuple[str, ...]
    """What a call of it needs, in the order in which it is loaded."""
    capabilities: frozenset[Capability]
    """Empty where it is not served."""


@dataclass(frozen=True, slots=True)
class PartFacts:
    """One part of a split model."""

    role: str
    bytes: Mapping[str, int]
    """Of its file, by precision."""
    tasks: tuple[str, ...]
    """Whose calls need it."""
    replaces: str | None = None
    """The part in whose place it can stand."""
    kind: str | None = None
    """The type that it computes in where no precision is wanted; None where it takes on that of its inputs."""

    def size(self, precision: str | None = None) -> int:
        """Bytes in a precision; where the part does not have that, or none is wanted, in the one that is used then."""
        found = self.bytes.get(precision) if precision is not None else None
        return found if found is not None else self.bytes[default_precision(self.bytes)]


@dataclass(frozen=True, slots=True)
class SplitFacts:
    """A split model by its plan."""

    digest: str
    """Of the plan's canonical text."""
    tasks: Mapping[str, TaskFacts]
    parts: Mapping[str, PartFacts]

    def task(self, name: object) -> str:
        """Return the name of a task as the plan has it, from one of any case; raises UnknownTask."""
        folded = fold(name)
        if folded is None or folded not in self.tasks:
            raise UnknownTask(name, list(self.tasks))
        return folded

    def part(self, name: object) -> str:
        """Return the name of a part as the plan has it, from one of any case; raises UnknownPart."""
        folded = fold(name)
        if folded is None or folded not in self.parts:
            raise UnknownPart(name, list(self.parts))
        return folded

    @property
    def capabilities(self) -> frozenset[Capability]:
        """What any of its tasks can be asked for."""
        return frozenset().union(*(task.capabilities for task in self.tasks.values()))


def default_precision(files: Mapping[str, object]) -> str:
    """Return the precision of a part where none is wanted: as stored, if it has that."""
    return STORED if STORED in files else next(iter(files))


def facts_of(plan: SplitPlan) -> SplitFacts:
    """Return what a plan says, without its tensors."""
    return SplitFacts(
        digest=plan.digest,
        tasks={
            name: TaskFacts(task.kind, task.parts, KIND_CAPABILITIES.get(task.kind, frozenset()))
            for name, task in plan.tasks.items()
        },
        parts={name: _part(part) for name, part in plan.parts.items()},
    )


def _part(part: Part) -> PartFacts:
    sizes = {precision: file.nbytes for precision, file in part.files.items()}
    kind = kind_of(part, default_precision(part.files))
    return PartFacts(part.role.value, sizes, part.tasks, part.replaces, kind)
