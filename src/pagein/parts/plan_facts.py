"""What follows from a plan for who serves it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from pagein.catalog.split.plan import Part, Role, SplitPlan
from pagein.catalog.split.precision import sizes_of
from pagein.parts.adapters import SCALING, SEPARATOR, A, B
from pagein.parts.guard import GuardRules


def room_for_all(plan: SplitPlan, forms: Mapping[str, str], rules: GuardRules) -> int:
    """Return bytes with which nothing ever has to leave: all files that are used are below the guard's watermark."""
    return math.ceil(sum(sizes_of(plan, forms).values()) / rules.start)


def kind_of_device(device: torch.device) -> str:
    """Return what the rule of ``precision="auto"`` calls a device."""
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "cuda without bf16"
    return str(device.type)


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
