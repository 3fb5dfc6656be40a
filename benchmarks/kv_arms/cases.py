"""Which way runs under which load, in how much memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB, GIB = 1024**2, 1024**3


@dataclass(frozen=True, slots=True)
class Setting:
    """What all cases share; tokens and bytes."""

    model: Path
    scratch: Path
    """On the disk that is the lowest tier."""
    limit: int
    """That the kernel holds every arm to, but the one that shows what stock takes where it may."""
    memory: int
    """For KV on the device, of Pagein's arm."""
    users: int = 20
    turns: int = 2
    document: int = 2400
    question: int = 32
    answer: int = 16

    @property
    def histories(self) -> Path:
        """What users said in their first turns, written by the first arm that gets through them."""
        return self.scratch / f"histories-of-{self.users}-with-{self.document}.json"

    @property
    def returning(self) -> int:
        """Turns with a history behind them."""
        return self.users * (self.turns - 1)


@dataclass(frozen=True, slots=True)
class Case:
    """One way under the users' load; ``limit`` None: as much memory as there is."""

    key: str
    way: str
    limit: int | None
    memory: int | None
    disk: bool = False
    writes: bool = False
    """Writes what users said in their first turns."""
    recalls: bool = False
    """Begins with the second turn: what it keeps of the first would be computed off the clock."""

    def arguments(self, told: Setting) -> list[str]:
        """For `pagein.kv.trial.run`."""
        names = ("users", "turns", "document", "question", "answer")
        words = [str(told.model), "--way", self.way, "--device", "cpu"]
        words += [word for name in names for word in (f"--{name}", str(getattr(told, name)))]
        words += ["--memory", str(self.memory if self.memory is not None else 1 << 50)]
        if self.disk:
            words += ["--disk", str(told.scratch / "tiers")]
        if self.recalls or self.writes:
            words += ["--histories", str(told.histories)]
        return words


def all_cases(told: Setting) -> Iterator[Case]:
    """In the order of a round: the first one writes the histories that others begin with."""
    yield Case("stock ample", "stock", None, None, writes=True)
    yield Case("tiered", "tiered", told.limit, told.memory, disk=True)
    yield Case("stock", "stock", told.limit, None)
    # Twice the KV that Pagein has: what the limit leaves beside model and one pass.
    yield Case("fitting", "fitting", told.limit, 2 * told.memory, recalls=True)
    yield Case("recompute", "recompute", told.limit, None, recalls=True)
    yield Case("offloaded", "offloaded", told.limit, None)


def long_cases(told: Setting) -> Iterator[Case]:
    """Conversations that nearly fill the model's context, where computing them anew costs most."""
    yield Case("long ample", "stock", None, None, writes=True)
    yield Case("long tiered", "tiered", told.limit, told.memory, disk=True)
    yield Case("long recompute", "recompute", told.limit, None, recalls=True)
