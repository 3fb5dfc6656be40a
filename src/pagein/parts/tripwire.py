"""Stops the use of a part's module outside every lease, also while the part happens to be there. Never loads.

Without it such a use works until the part leaves, and fails then: at some other time, in some other place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from pagein.catalog.split.plan import Role
from pagein.errors import NotResident
from pagein.parts.groups import Group
from pagein.parts.residency import Residency


class Tripwire:
    """A forward pre-hook; a copy of it, in the copy of a module, stops nothing."""

    def __init__(self, home: Residency | None, groups: tuple[str, ...], tensor: str) -> None:
        self._home, self._groups, self._tensor = home, groups, tensor

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Raise NotResident unless one of the parts that the module can be of is leased or pinned."""
        if torch.compiler.is_compiling() or self._home is None:  # leases are taken outside of compiled graphs
            return
        groups: list[Group] = [self._home.groups[name] for name in self._groups]
        names = {name for one in groups for name in (one.name, *one.rivals)}
        if not any(self._home.groups[name].leases or self._home.guard.is_pinned(name) for name in names):
            raise NotResident(groups[0].tasks, self._tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tripwire:
        return Tripwire(None, (), "")


def lay_tripwires(model: nn.Module, home: Residency) -> None:
    """Put a tripwire on the topmost modules all of whose tensors belong to one part, or to those in its place."""
    owners: dict[int, set[str]] = {}
    for group in home.groups.values():
        if group.part.role is Role.BACKBONE:
            continue
        for name in home.seats.names(group.part):
            owners.setdefault(id(home.seats.seat(name)), set()).add(group.name)
    stack: list[tuple[str, nn.Module]] = list(model.named_children())
    while stack:
        prefix, module = stack.pop()
        names = home.seats.names_under(prefix)
        found = {frozenset(owners.get(id(home.seats.seat(name)), ())) for name in names}
        if len(found) == 1 and (groups := next(iter(found))):
            module.register_forward_pre_hook(Tripwire(home, tuple(sorted(groups)), names[0]))
        elif len(found) > 1:
            stack.extend((f"{prefix}.{name}", child) for name, child in module.named_children())
