"""What follows from a plan for who serves it."""

from __future__ import annotations

import math

from pagein.parts.adapters import SCALING, SEPARATOR, A, B
from pagein.parts.guard import GuardRules
from pagein.parts.plan import STORED, Part, Role, SplitPlan


def room_for_all(plan: SplitPlan, rules: GuardRules) -> int:
    """Return bytes with which nothing ever has to leave: all files are below the guard's watermark."""
    return math.ceil(sum(one.nbytes for _, _, one in plan.files()) / rules.start)


def default_precision(part: Part) -> str:
    """Return the precision of a part where none is wanted: as stored, if it has that."""
    return STORED if STORED in part.files else next(iter(part.files))


def chain_of(plan: SplitPlan, part: Part) -> list[str]:
    """Return a part's name, and those in whose places it can stand; the part may be one of an earlier plan."""
    names, now = [part.name], part
    while now.replaces is not None and now.replaces in plan.parts:
        now = plan.parts[now.replaces]
        names.append(now.name)
    return names


def adapted_modules(plan: SplitPlan) -> list[str]:
    """Return the modules that adapter parts change."""
    found: dict[str, None] = {}
    for part in plan.parts.values():
        if part.role is Role.ADAPTER:
            for name in part.tensor_names():
                owner, _, path = name.partition(SEPARATOR)
                if owner == part.name and path:
                    ending = next((one for one in (A, B, SCALING) if path.endswith(f".{one}")), None)
                    found[path.removesuffix(f".{ending}") if ending else path.rpartition(".")[0]] = None
    return list(found)
