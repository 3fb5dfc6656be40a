"""One process of one model, as the fleet knows it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pagein.errors import PageinError
from pagein.supervisor.child import Child
from pagein.supervisor.limits import Cell, limit_for, outgrown, sacrificed


@dataclass(slots=True)
class Worker:
    """From the order to load until its memory is back."""

    allowance: dict[str, int] = field(default_factory=dict)
    start: asyncio.Task[None] | None = None
    child: Child | None = None
    cell: Cell | None = None
    """Its cgroup, where it has one."""
    announced: bool = False
    """The scheduler knows that it is ready."""
    told: PageinError | None = None
    """Why it was told to leave; None while it was not."""
    over: bool = False
    """Its process is gone and was reported."""

    def limit(self, margin: int | float) -> int | None:
        """Bytes of RAM at which it is ended; None for one that was granted none."""
        allowance = self.allowance.get("ram")
        return None if allowance is None else limit_for(allowance, margin)

    def why(self, name: str, error: PageinError) -> PageinError:
        """Why it ended: the kernel's own word, where that ended it for its memory, else the error."""
        if self.cell is None:
            return error
        allowance = self.allowance.get("ram", 0)
        found = outgrown(name, self.cell, allowance) or sacrificed(name, self.cell, allowance)
        if found is None:
            return error
        found.details["log"] = error.details.get("log", [])
        return found
