"""What `/health/lazy` says of one model: each part as it is now. Nothing here loads, or waits for a load or call."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from pagein.parts.groups import Group
from pagein.parts.guard import Guard
from pagein.parts.thrash import ThrashReport


@dataclass(frozen=True, slots=True)
class PartReport:
    """One part."""

    part: str
    role: str
    tasks: tuple[str, ...]
    state: str
    bytes: int
    """That it has in memory now, or has reserved."""
    file_bytes: int
    precision: str
    digest: str
    """The sha256 of its file."""
    leases: int
    pinned: bool
    held_outside: bool
    """Whether someone holds its tensors beside all leases."""
    stands_for: str | None
    """The part in whose place it serves."""
    idle_seconds: float | None
    """Since its last use ended; None while it is used, and before."""
    loads: int
    evictions: int
    load_seconds: float | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class PartsReport:
    """All parts of a model."""

    level: str
    plan: str
    """The digest of the plan."""
    allowance: int
    owned: int
    waiting: int
    """Calls that stand in the line for memory."""
    parts: tuple[PartReport, ...]
    thrash: ThrashReport

    def as_json(self) -> dict[str, object]:
        """Return it as JSON-ready values."""
        return asdict(self)


def report_of(group: Group, guard: Guard, stands_for: str | None, now: float) -> PartReport:
    """Say how one part is; the caller has the lock."""
    idle = None if group.leases or group.used_at is None else max(0.0, now - group.used_at)
    return PartReport(
        group.name,
        group.part.role.value,
        group.part.tasks,
        group.state.value,
        guard.bytes_of(group.name),
        group.entry.nbytes,
        group.precision,
        group.entry.sha256,
        group.leases,
        guard.is_pinned(group.name),
        group.outside is not None,
        stands_for,
        idle,
        group.loads,
        group.evictions,
        group.seconds,
        group.last_error,
    )
