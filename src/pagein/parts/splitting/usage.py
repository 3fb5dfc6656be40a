"""The influence matrix for people: task × group of tensors, where a group is a module whose tensors are used alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pagein.parts.splitting.rules import Influence

MOST_GROUPS = 60
"""Rows of the table; deeper modules are summed up until it has no more."""
_DEEPEST = 12


@dataclass(frozen=True, slots=True)
class Group:
    """One row: tensors of one module."""

    name: str
    nbytes: int
    tensors: int
    use: Mapping[str, float]
    """By task: which share of its bytes the calls used, 0 to 1, averaged over the samples."""


@dataclass(frozen=True, slots=True)
class _Row:
    path: tuple[str, ...]
    nbytes: int
    use: tuple[float, ...]


def groups(influence: Influence, shown: Mapping[str, str] | None = None) -> tuple[Group, ...]:
    """Sum the matrix up: as deep as it differs, and no deeper than the table can show.

    ``shown``: other names for some tensors.
    """
    tasks = list(influence.samples)
    rows = list(_rows(influence, tasks, shown or {}))
    for deepest in range(_DEEPEST, 0, -1):
        found = _merged(list(_split((), rows, tasks, deepest)))
        if len(found) <= MOST_GROUPS:
            break
    return tuple(found)


def _rows(influence: Influence, tasks: Sequence[str], shown: Mapping[str, str]) -> Iterator[_Row]:
    twins = {name: group for group in influence.tied for name in group}
    done: set[str] = set()
    for name, use in influence.tensors.items():
        if name in done:
            continue
        names = [one for one in twins.get(name, (name,)) if one in influence.tensors]
        done.update(names)
        calls = [max(influence.tensors[one].calls.get(task, 0) for one in names) for task in tasks]
        share = tuple(n / influence.samples[task] for n, task in zip(calls, tasks, strict=True))
        yield _Row(tuple(shown.get(name, name).split(".")), use.nbytes, share)


def _split(prefix: tuple[str, ...], rows: list[_Row], tasks: Sequence[str], left: int) -> Iterator[Group]:
    if left == 0 or len({row.use for row in rows}) == 1 or any(len(row.path) <= len(prefix) for row in rows):
        yield _sum(prefix, rows, tasks)
        return
    children: dict[str, list[_Row]] = {}
    for row in rows:
        children.setdefault(row.path[len(prefix)], []).append(row)
    for child, inner in children.items():
        yield from _split((*prefix, child), inner, tasks, left if len(children) == 1 else left - 1)


def _sum(prefix: tuple[str, ...], rows: list[_Row], tasks: Sequence[str]) -> Group:
    name = ".".join(prefix or _common(rows)) or "all"
    total = sum(row.nbytes for row in rows)
    use = {
        task: round(sum(row.use[at] * row.nbytes for row in rows) / total, 4) if total else 0.0
        for at, task in enumerate(tasks)
    }
    return Group(name, total, len(rows), use)


def _common(rows: list[_Row]) -> tuple[str, ...]:
    first = rows[0].path
    length = 0
    while length < len(first) and all(row.path[: length + 1] == first[: length + 1] for row in rows):
        length += 1
    return first[:length]


def _merged(found: list[Group]) -> list[Group]:
    """Join neighbours that are numbered and used alike: ``layers.0`` to ``layers.11`` are ``layers.0-11``."""
    merged: list[Group] = []
    for group in found:
        last = merged[-1] if merged else None
        if last is not None and last.use == group.use and _follows(last.name, group.name):
            head, _, numbers = last.name.rpartition(".")
            name = f"{head}.{numbers.split('-')[0]}-{group.name.rpartition('.')[2]}"
            merged[-1] = replace(
                last, name=name, nbytes=last.nbytes + group.nbytes, tensors=last.tensors + group.tensors
            )
        else:
            merged.append(group)
    return merged


def _follows(before: str, name: str) -> bool:
    head, _, numbers = before.rpartition(".")
    other, _, number = name.rpartition(".")
    last = numbers.rpartition("-")[2]
    return head == other and last.isdigit() and number.isdigit() and int(number) == int(last) + 1
