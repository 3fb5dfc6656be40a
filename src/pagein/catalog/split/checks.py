"""What the fields of a plan must mean to each other, whoever made it: references, tensors, tied groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from pagein.catalog.safetensors import FILLER
from pagein.catalog.split.packed import shapes_of
from pagein.catalog.split.plan import Part, Role, SplitPlan
from pagein.errors import PlanRefused


def check_plan(plan: SplitPlan, file: object) -> None:
    """Raise PlanRefused unless everything that the plan refers to is there, once, and fits together."""
    if not plan.tasks or not plan.parts:
        raise PlanRefused(file, "plan", f"has {len(plan.tasks)} tasks and {len(plan.parts)} parts; it needs some")
    _check_tasks(plan, file)
    _check_roles(plan, file)
    roots = {name: _root_of(plan, name, file) for name in plan.parts}
    _check_tensors(plan, roots, file)
    _check_precisions(plan, file)
    _check_tied(plan, roots, file)
    _check_rest(plan, file)


def _check_tasks(plan: SplitPlan, file: object) -> None:
    users: dict[str, set[str]] = {name: set() for name in plan.parts}
    for name, task in plan.tasks.items():
        where = f"plan.tasks.{name}.parts"
        if not task.parts:
            raise PlanRefused(file, where, "has no part")
        _no_repeats(task.parts, file, where)
        for part in task.parts:
            if part not in plan.parts:
                raise PlanRefused(file, where, f"names the part {part!r}, which the plan does not have")
            users[part].add(name)
    for name, part_entry in plan.parts.items():
        where = f"plan.parts.{name}.tasks"
        _no_repeats(part_entry.tasks, file, where)
        if set(part_entry.tasks) != users[name]:
            raise PlanRefused(
                file, where, f"lists {_some(part_entry.tasks)}, the tasks that name the part are {_some(users[name])}"
            )


def _check_roles(plan: SplitPlan, file: object) -> None:
    backbones = [name for name, part in plan.parts.items() if part.role is Role.BACKBONE]
    if len(backbones) > 1:
        raise PlanRefused(file, "plan.parts", f"has {len(backbones)} backbones ({_some(backbones)}), one is allowed")
    for name, part in plan.parts.items():
        where = f"plan.parts.{name}"
        if part.role is Role.BACKBONE and (len(part.tasks) != len(plan.tasks) or part.replaces):
            raise PlanRefused(file, where, f"is the backbone, and {len(part.tasks)} of {len(plan.tasks)} tasks name it")
        if part.role is Role.TASK and len(part.tasks) > 1:
            raise PlanRefused(file, where, f"is one task's own, and {len(part.tasks)} tasks name it")
        if part.replaces is not None and part.replaces not in plan.parts:
            raise PlanRefused(file, f"{where}.replaces", f"names the part {part.replaces!r}, which is not there")


def _root_of(plan: SplitPlan, name: str, file: object) -> str:
    """Return the part that a chain of replacements begins with."""
    seen, last = {name: None}, name
    while (before := plan.parts[last].replaces) is not None:
        if before in seen:
            circle = [*list(seen)[:8], *(["…"] if len(seen) > 8 else []), before]
            raise PlanRefused(file, f"plan.parts.{name}.replaces", f"goes in a circle: {' → '.join(circle)}")
        seen[before], last = None, before
    return last


def _check_tensors(plan: SplitPlan, roots: dict[str, str], file: object) -> None:
    """A tensor belongs to one part; only those that stand in each other's place may have the same."""
    owner: dict[str, str] = {}
    for name, part in plan.parts.items():
        for tensor in part.tensor_names():
            if tensor.startswith(FILLER):
                raise PlanRefused(file, f"plan.parts.{name}", f"has the tensor {tensor!r}: such names fill gaps")
            other = owner.setdefault(tensor, name)
            if roots[other] != roots[name]:
                raise PlanRefused(file, f"plan.parts.{name}", f"has the tensor {tensor!r}, as the part {other!r} has")
    for name, task in plan.tasks.items():
        held: dict[str, str] = {}
        for part_name in task.parts:
            for tensor in plan.parts[part_name].tensor_names():
                other = held.setdefault(tensor, part_name)
                if other != part_name:
                    raise PlanRefused(
                        file, f"plan.tasks.{name}.parts", f"{other!r} and {part_name!r} both have {tensor!r}"
                    )


def _check_precisions(plan: SplitPlan, file: object) -> None:
    """A part brings the same tensors in every precision: one that a file lacks would never be there."""
    for name, part in plan.parts.items():
        first: tuple[str, Mapping[str, tuple[tuple[int, ...], ...]]] | None = None
        for precision, entry in part.files.items():
            where = f"plan.parts.{name}.files.{precision}"
            try:
                shapes = shapes_of(precision, entry)
            except ValueError as error:
                raise PlanRefused(file, where, str(error)) from None
            first = first or (precision, shapes)
            if missing := sorted(first[1].keys() ^ shapes.keys()):
                raise PlanRefused(file, where, f"has other tensors than {first[0]}: {_some(missing)}")
            for tensor, able in shapes.items():
                if not set(able).intersection(first[1][tensor]):
                    why = f"{tensor!r} has the shape {list(able[0])}, in {first[0]} {list(first[1][tensor][0])}"
                    raise PlanRefused(file, where, why)


def _check_tied(plan: SplitPlan, roots: dict[str, str], file: object) -> None:
    homes: dict[str, set[str]] = {}
    for name, part in plan.parts.items():
        for tensor in part.tensor_names():
            homes.setdefault(tensor, set()).add(roots[name])
    seen: set[str] = set()
    for index, group in enumerate(plan.tied):
        where = f"plan.tied[{index}]"
        _no_repeats(group, file, where)
        if len(group) < 2:
            raise PlanRefused(file, where, f"has {len(group)} name, tied are two at least")
        if again := seen.intersection(group):
            raise PlanRefused(file, where, f"{_some(again)} is tied in another group, too")
        seen.update(group)
        parts = set[str]().union(*(homes.get(name, set()) for name in group))
        if len(parts) > 1:
            raise PlanRefused(file, where, f"lies in the parts {_some(parts)}: tied tensors belong in one")
        for entry in _files(plan.parts.values()):
            stored = [name for name in group if name in entry]
            if len(stored) > 1:
                raise PlanRefused(file, where, f"{_some(stored)} are one tensor, and stored {len(stored)} times")


def _files(parts: Iterable[Part]) -> Iterable[Iterable[str]]:
    return [file.tensors.keys() for part in parts for file in part.files.values()]


def _check_rest(plan: SplitPlan, file: object) -> None:
    stored = {tensor: name for name, part in plan.parts.items() for tensor in part.tensor_names()}
    _no_repeats(plan.untouched, file, "plan.untouched")
    for tensor in plan.untouched:
        home = stored.get(tensor)
        if home is not None and plan.parts[home].role is not Role.BACKBONE:
            raise PlanRefused(file, "plan.untouched", f"{tensor!r} is used by no task and lies in the part {home!r}")
    for tensor in plan.buffers:
        if tensor in stored:
            raise PlanRefused(file, "plan.buffers", f"{tensor!r} is said to be in no file, {stored[tensor]!r} has it")
    for name in plan.saves:
        if name not in plan.tasks:
            raise PlanRefused(file, "plan.saves", f"names the task {name!r}, which is not there")
    digests: dict[str, str] = {}
    for part, precision, entry in plan.files():
        if digests.setdefault(entry.file, entry.sha256) != entry.sha256:
            where = f"plan.parts.{part.name}.files.{precision}"
            raise PlanRefused(file, where, f"{entry.file} stands for two contents")


def _no_repeats(names: Iterable[str], file: object, where: str) -> None:
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise PlanRefused(file, where, f"has {twice[0]!r} twice")


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(map(repr, listed[:5])) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "") or "none"
