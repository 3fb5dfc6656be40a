"""In which precision each part of a split is used: as it is asked for, or by a rule of the device (``auto``). Pure.

The rule of ``auto``:

1. all parts in the device's own type, or none: on a CPU bf16; on CUDA bf16, then fp16 (on a GPU without bf16 of its own
   the other way round). A type counts where each part has a file in it, or is of that type as stored. Else: as stored.
2. only where a limit of memory is given, and the parts of a task are together larger than it: they are taken packed,
   the largest first, in int8 until they fit, then in int4. What has no such file stays as it is.

Whoever chooses, parts that compute together must do so in one type: `check_together` names two that do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pagein.catalog.split import packed
from pagein.catalog.split.facts import default_precision
from pagein.catalog.split.kinds import KINDS, kind_of
from pagein.catalog.split.plan import PRECISIONS, STORED, Part, SplitPlan
from pagein.errors import BadUsage, ModelUnsuited, UnknownPart

AUTO = "auto"
FLOATS: dict[str, tuple[str, ...]] = {"cpu": ("bf16",), "cuda": ("bf16", "fp16"), "cuda without bf16": ("fp16", "bf16")}
"""Types to be tried, in this order, by device."""

Precisions = str | Mapping[str, str]
"""One for all parts that have it, or one by part; what is not named is used as stored."""


def choose(plan: SplitPlan, wanted: Precisions, device: str = "cpu", memory: int | None = None) -> dict[str, str]:
    """Return the precision of each part; raises BadUsage, UnknownPart. ``device`` is a key of `FLOATS`, or another.

    ``memory``: bytes for all parts; None where no limit was given.
    """
    if not isinstance(wanted, str):
        return _by_part(plan, wanted)
    if wanted == AUTO:
        return _auto(plan, device, memory)
    if wanted not in PRECISIONS:
        raise BadUsage(f"precision is {AUTO} or one of {', '.join(PRECISIONS)}, not {wanted[:40]!r}")
    have = {precision for part in plan.parts.values() for precision in part.files}
    if wanted not in have and wanted != STORED:
        raise UnknownPart(wanted, sorted(have), "precision of any part")
    return _where_there(plan, wanted)


def extend(plan: SplitPlan, forms: Mapping[str, str], wanted: Precisions) -> dict[str, str]:
    """Return the precision of each part where some are in use already (``forms``): those stay, others join them.

    What can stand in the place of a part comes in the form of that one, where it has it.
    """
    places = _Places(plan)
    found: dict[str, str] = {}
    for name, part in plan.parts.items():
        beside = next((forms[one] for one in (name, *places.beside(name)) if one in forms), None)
        asked = wanted if isinstance(wanted, str) else wanted.get(name)
        able = [one for one in (forms.get(name), beside, asked) if one in part.files]
        found[name] = able[0] if able and able[0] is not None else default_precision(part.files)
    return found


def check_together(plan: SplitPlan, forms: Mapping[str, str]) -> None:
    """Raise ModelUnsuited where two parts of one task would compute in different types, unless they do so as stored."""
    places = _Places(plan)
    kinds = {name: kind_of(part, forms[name]) for name, part in plan.parts.items()}
    same = {name: kinds[name] == _stored_kind(part) for name, part in plan.parts.items()}
    for task in plan.tasks.values():
        first: dict[tuple[str | None, bool], str] = {}
        for part in task.parts:
            for name in places.beside(part):
                first.setdefault((kinds[name], same[name]), name)
        ours = [name for (kind, _), name in first.items() if kind is not None]
        for at, one in enumerate(ours):
            for other in ours[at + 1 :]:
                if kinds[one] != kinds[other] and not (same[one] and same[other]):
                    raise _apart(task.name, (one, forms[one], kinds[one]), (other, forms[other], kinds[other]))


def sizes_of(plan: SplitPlan, forms: Mapping[str, str]) -> dict[str, int]:
    """Return the bytes of each part's file in the precision that it is used in."""
    return {name: part.file(forms[name]).nbytes for name, part in plan.parts.items()}


def _apart(task: str, one: tuple[str, str, str | None], other: tuple[str, str, str | None]) -> ModelUnsuited:
    words = " and ".join(f"part {name!r} in {kind} ({form})" for name, form, kind in (one, other))
    return ModelUnsuited(
        f"the task {task!r} would compute with {words}: parts that compute together need one type",
        hint="choose one precision that all parts have, 'auto', or none; 'pagein split apply --precision' adds files",
    )


def _by_part(plan: SplitPlan, wanted: Mapping[str, str]) -> dict[str, str]:
    """Return what is asked for by part; those in whose place another can stand take it along where they have it."""
    named = {plan.part(name).name: form for name, form in wanted.items()}
    for name, form in named.items():
        plan.parts[name].file(form)
    found = {name: default_precision(part.files) for name, part in plan.parts.items()}
    for names in _Places(plan).all():
        asked = [named[name] for name in names if name in named]
        if asked:
            found |= {name: asked[0] for name in names if asked[0] in plan.parts[name].files}
    return {**found, **named}


def _where_there(plan: SplitPlan, precision: str) -> dict[str, str]:
    """Return a precision for all parts that have it; packed ones where each that can stand in the place has it, too."""
    found: dict[str, str] = {}
    for names in _Places(plan).all():
        able = precision not in packed.PRECISIONS or _all_have(plan, names, precision)
        for name in names:
            files = plan.parts[name].files
            found[name] = precision if able and precision in files else default_precision(files)
    return found


def _auto(plan: SplitPlan, device: str, memory: int | None) -> dict[str, str]:
    stored = {name: default_precision(part.files) for name, part in plan.parts.items()}
    kind = next((one for one in FLOATS.get(device, ()) if _can_all(plan, stored, one)), None)
    plain = stored if kind is None else _where_there(plan, kind)
    if memory is None or _largest_task(plan, plain) <= memory:
        return plain
    small = _packed_to_fit(plan, stored, memory)
    return small if _largest_task(plan, small) < _largest_task(plan, plain) else plain


def _can_all(plan: SplitPlan, stored: Mapping[str, str], precision: str) -> bool:
    """Tell whether every part has a file of this type, or is of that type, or has no type of its own."""
    return all(
        precision in part.files or kind_of(part, stored[name]) in (None, KINDS[precision])
        for name, part in plan.parts.items()
    )


def _packed_to_fit(plan: SplitPlan, stored: Mapping[str, str], memory: int) -> dict[str, str]:
    found, places = dict(stored), _Places(plan)
    sizes = places.sizes(found)
    for task in sorted(plan.tasks):
        roots = [places.root_of[part] for part in plan.tasks[task].parts]
        for precision in packed.PRECISIONS:
            total = sum(sizes[root] for root in roots)
            for root in sorted(roots, key=lambda name: (-sizes[name], name)):
                if total <= memory:
                    break
                if not _all_have(plan, places.members[root], precision):
                    continue
                tried = found | dict.fromkeys(places.members[root], precision)
                if (size := places.size(root, tried)) < sizes[root]:  # another task may have had it in fewer bits
                    total += size - sizes[root]
                    found, sizes[root] = tried, size
    return found


def _largest_task(plan: SplitPlan, forms: Mapping[str, str]) -> int:
    """Bytes of the parts of that task which has most, each the largest of those that can stand in its place."""
    places = _Places(plan)
    sizes = places.sizes(forms)
    return max(sum(sizes[places.root_of[part]] for part in task.parts) for task in plan.tasks.values())


def _all_have(plan: SplitPlan, names: Iterable[str], precision: str) -> bool:
    return all(precision in plan.parts[name].files for name in names)


class _Places:
    """Which parts can stand in each other's place: they come in one form."""

    def __init__(self, plan: SplitPlan) -> None:
        self._plan = plan
        self.root_of: dict[str, str] = {}
        """The part that each one's chain of replacements begins with."""
        self.members: dict[str, list[str]] = {}
        """Of each root."""
        for name in plan.parts:
            root = name
            while (before := plan.parts[root].replaces) is not None:
                root = before
            self.root_of[name] = root
            self.members.setdefault(root, []).append(name)

    def all(self) -> Iterable[list[str]]:
        """The parts of each place."""
        return self.members.values()

    def beside(self, part: str) -> list[str]:
        """All that can stand in a part's place, itself among them."""
        return self.members[self.root_of[part]]

    def size(self, root: str, forms: Mapping[str, str]) -> int:
        """Bytes that a place takes at most."""
        return max(self._plan.parts[name].file(forms[name]).nbytes for name in self.members[root])

    def sizes(self, forms: Mapping[str, str]) -> dict[str, int]:
        """The same of each place, by its root."""
        return {root: self.size(root, forms) for root in self.members}


def _stored_kind(part: Part) -> str | None:
    return kind_of(part, STORED) if STORED in part.files else ""
