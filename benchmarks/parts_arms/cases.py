"""Which ways answer the traffic, in how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic

from parts_arms.models import Models
from parts_arms.traffic import BLOCK

MIB, GIB = 1024**2, 1024**3
RESTING = 0
"""Requests of a case that only starts."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share."""

    models: Models
    beside: int
    """Bytes that a process gets beside the parts: Python, torch, activations, KV."""
    requests: int
    instances: int

    @property
    def few(self) -> int:
        """Requests where each takes long, or several answer at once."""
        return max(BLOCK, self.requests // 3 // BLOCK * BLOCK)

    @property
    def limit(self) -> int:
        """Bytes of the group in which the ways compete: what one task at a time takes."""
        return self.models.one_task + self.beside


@dataclass(frozen=True, slots=True)
class Case:
    """One way under the traffic; ``limit`` None: as much memory as there is. ``memory`` None: for all parts."""

    key: str
    way: str
    limit: int | None
    requests: int
    memory: int | None = None

    def arguments(self, told: Setting) -> list[str]:
        """For `parts_arms.serve`, of a process that starts now."""
        return [self.way, str(told.models.split), str(monotonic()), str(self.requests), str(self.memory or 0)]


def all_cases(told: Setting) -> Iterator[Case]:
    """In the order of a round."""
    count, one_task = told.requests, told.models.one_task
    yield Case("full ample", "full", None, count)
    yield Case("mapped ample", "mapped", None, count)
    yield Case("pagein ample", "pagein", None, count)
    yield Case("full", "full", told.limit, count)
    yield Case("mapped", "mapped", told.limit, count)
    yield Case("hooks", "hooks", told.limit, told.few)
    yield Case("pagein", "pagein", told.limit, count, one_task)


def cold_cases(told: Setting) -> Iterator[Case]:
    """Starts, up to the first answer."""
    for way in ("full", "mapped", "hooks", "pagein"):
        yield Case(f"cold {way}", way, None, RESTING, told.models.one_task)


def instance(told: Setting) -> Case:
    """One of several that share the memory of a full load."""
    return Case("instances", "pagein", None, told.few, told.models.one_task)
