"""From what each task was seen to use to parts: the three rules (P1), and whether a split is worth anything. Pure.

A tensor may leave the backbone for a part only where

1. no task reads what is computed from it but those that own it,
2. its part shares it with no other part (tied names are one tensor),
3. every call of its tasks needs it: a part is always needed whole.

What breaks a rule stays in the backbone, with the reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pagein.catalog.split.names import LONGEST, is_name
from pagein.catalog.split.plan import Role, Saving
from pagein.errors import SplitBroken
from pagein.units import format_bytes

BACKBONE = "backbone"
SHARED = "shared."
"""What the names of shared parts begin with."""
LEAST_SHARED = 1024**2
"""Bytes below which a shared part is not worth a file and a load of its own."""
WORTHLESS = 0.95
"""Share of the model's bytes from which on a task that needs them saves nothing."""


@dataclass(frozen=True, slots=True)
class TensorUse:
    """One row of the influence matrix, over all sample calls."""

    nbytes: int
    calls: Mapping[str, int] = field(default_factory=dict)
    """In how many sample calls of each task it was touched; tasks that never did may be missing."""
    readers: frozenset[str] = frozenset()
    """Tasks that read what another's call computed from it (a cached encoding, say), beside those in ``calls``."""


@dataclass(frozen=True, slots=True)
class Influence:
    """The influence matrix: which task touched which tensor, and how often."""

    samples: Mapping[str, int]
    """Sample calls made of each task."""
    tensors: Mapping[str, TensorUse]
    """By name; of tied names each has its own row or only one has."""
    tied: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Assigned:
    """One part as the rules make it."""

    role: Role
    tasks: tuple[str, ...]
    tensors: tuple[str, ...]
    """One name of each stored tensor, in the order of the matrix."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Why tensors that not all tasks use stay in the backbone all the same."""

    tensor: str
    nbytes: int
    rule: int | None
    """Which of the three rules it breaks; None where the reason is another."""
    reason: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """The parts of a model, and what they save."""

    parts: Mapping[str, Assigned]
    tasks: Mapping[str, tuple[str, ...]]
    """The parts of each task, in the order of loading."""
    tied: tuple[tuple[str, ...], ...]
    untouched: tuple[str, ...]
    """Used by no task in any sample; they stay in the backbone."""
    kept: tuple[Kept, ...]
    nbytes: int
    saves: Mapping[str, Saving]
    """What each task need not load."""

    @property
    def saves_nothing(self) -> bool:
        """Whether every task needs nearly the whole model, as where the task is in the prompt."""
        return all(1 - saving.share >= WORTHLESS for saving in self.saves.values())

    def verdict(self) -> list[str]:
        """Say plainly, line by line, what the split is good for."""
        lines = []
        for task, saving in sorted(self.saves.items()):
            need = self.nbytes - saving.nbytes
            share = f"{100 * (1 - saving.share):.1f} % of {format_bytes(self.nbytes)}"
            verdict = "saves nothing" if 1 - saving.share >= WORTHLESS else f"saves {format_bytes(saving.nbytes)}"
            lines.append(f"{task}: needs {format_bytes(need)}, {share}: {verdict}")
        if self.saves_nothing:
            lines.append("the split saves nothing: every task needs the same weights")
        if self.untouched:
            size = sum(one.nbytes for one in self.kept if one.tensor in set(self.untouched))
            lines.append(f"{len(self.untouched)} tensors ({format_bytes(size)}) were used by no task in any sample")
        return lines


@dataclass(frozen=True, slots=True)
class _Row:
    """One stored tensor: tied names are one row."""

    name: str
    nbytes: int
    calls: Mapping[str, int]
    readers: frozenset[str]


def assign(influence: Influence, least_shared: int = LEAST_SHARED) -> Assignment:
    """Return the parts that the three rules allow; raises SplitBroken for tasks that have no name or were not run."""
    _check(influence)
    rows = _rows(influence)
    homes: dict[str, frozenset[str]] = {}
    kept: list[Kept] = []
    everyone = frozenset(influence.samples)
    for row in rows:
        owners, reason = _owners(row, influence.samples)
        if reason is not None:
            kept.append(reason)
        homes[row.name] = owners if owners != everyone else frozenset()
    sizes: dict[frozenset[str], int] = {}
    for row in rows:
        sizes[homes[row.name]] = sizes.get(homes[row.name], 0) + row.nbytes
    for row in rows:
        owners = homes[row.name]
        if len(owners) > 1 and sizes[owners] < least_shared:
            what = f"{_list(owners)} share only {format_bytes(sizes[owners])}"
            kept.append(Kept(row.name, row.nbytes, None, f"{what}: not worth a part of its own"))
            homes[row.name] = frozenset()
    untouched = tuple(row.name for row in rows if not any(row.calls.values()))
    return _assignment(influence, rows, homes, untouched, kept)


def _check(influence: Influence) -> None:
    if not influence.samples:
        raise SplitBroken("there is no task to split the model by")
    for task, samples in influence.samples.items():
        if not is_name(task) or task == BACKBONE or task.startswith(SHARED):
            raise SplitBroken(f"{task[:80]!r} cannot be a task's name here", hint=f"other than {BACKBONE}, {SHARED}…")
        if samples < 1:
            raise SplitBroken(f"task {task!r} was not run with any sample, so nothing is known of what it uses")
    for name, use in influence.tensors.items():
        for task in (*use.calls, *use.readers):
            if task not in influence.samples:
                raise SplitBroken(f"the tensor {name!r} is said to be used by {task!r}, which is no task here")


def _rows(influence: Influence) -> list[_Row]:
    """Merge tied names: who uses one of them uses the tensor."""
    group_of = {name: group for group in influence.tied for name in group}
    rows: list[_Row] = []
    done: set[str] = set()
    for name, use in influence.tensors.items():
        if name in done:
            continue
        names = tuple(one for one in group_of.get(name, (name,)) if one in influence.tensors) or (name,)
        done.update(names)
        uses = [influence.tensors[one] for one in names]
        # A call that touched two of the names touched one tensor: the larger count is a lower bound of the calls.
        calls = {task: max(one.calls.get(task, 0) for one in uses) for task in influence.samples}
        readers = frozenset[str]().union(*(one.readers for one in uses))
        rows.append(_Row(name, use.nbytes, {task: n for task, n in calls.items() if n}, readers))
    return rows


def _owners(row: _Row, samples: Mapping[str, int]) -> tuple[frozenset[str], Kept | None]:
    """Return the tasks that may own a tensor, none for the backbone, and why it stays where it is not used by all."""
    users = frozenset(row.calls)
    if not users:
        return frozenset(), Kept(row.name, row.nbytes, None, "no task used it in any sample")
    if users == frozenset(samples):
        return users, None
    strangers = row.readers - users
    if strangers:
        reason = f"{_list(strangers)} reads what {_list(users)} computes from it"
        return frozenset(), Kept(row.name, row.nbytes, 1, reason)
    for task in sorted(users):
        if row.calls[task] < samples[task]:
            reason = f"{row.calls[task]} of {samples[task]} calls of {task!r} need it"
            return frozenset(), Kept(row.name, row.nbytes, 3, reason)
    return users, None


def _assignment(
    influence: Influence,
    rows: list[_Row],
    homes: Mapping[str, frozenset[str]],
    untouched: tuple[str, ...],
    kept: list[Kept],
) -> Assignment:
    everyone = tuple(sorted(influence.samples))
    members: dict[frozenset[str], list[_Row]] = {}
    for row in rows:
        members.setdefault(homes[row.name], []).append(row)
    parts: dict[str, Assigned] = {}
    for owners in sorted(members, key=lambda one: (len(one) > 0, -len(one), sorted(one))):
        tasks, name, role = tuple(sorted(owners)) or everyone, BACKBONE, Role.BACKBONE
        if owners:
            name, role = (tasks[0], Role.TASK) if len(tasks) == 1 else (shared_name(tasks), Role.SHARED)
        found = members[owners]
        parts[name] = Assigned(role, tasks, tuple(row.name for row in found), sum(row.nbytes for row in found))
    tasks_parts = {task: tuple(name for name, part in parts.items() if task in part.tasks) for task in everyone}
    total = sum(row.nbytes for row in rows)
    saves = {}
    for task, names in tasks_parts.items():
        left = total - sum(parts[name].nbytes for name in names)
        saves[task] = Saving(left, round(left / total, 6) if total else 0.0)
    tied = tuple(group for group in influence.tied if len(group) > 1)
    return Assignment(parts, tasks_parts, tied, untouched, tuple(kept), total, saves)


def shared_name(tasks: Iterable[str]) -> str:
    """Return the name of the part that these tasks share: theirs, or a digest of theirs where those are too long."""
    listed = sorted(tasks)
    name = SHARED + ".".join(listed)
    return name if len(name) <= LONGEST else SHARED + hashlib.sha256("\n".join(listed).encode()).hexdigest()[:16]


def _list(names: Iterable[str]) -> str:
    return " and ".join(repr(name) for name in sorted(names))
