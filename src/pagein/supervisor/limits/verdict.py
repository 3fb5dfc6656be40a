"""What an OOM kill in a worker's group means for the model."""

from __future__ import annotations

from pagein.errors import LoadFailed, Outgrown
from pagein.supervisor.limits.cell import Cell
from pagein.units import format_bytes


def outgrown(name: str, cell: Cell, allowance: int) -> Outgrown | None:
    """Return the error for a worker that the kernel ended at its own limit; None when it did not.

    Asked before the group is removed. ``allowance`` is what it was granted of RAM, in bytes. The peak in the error is
    a lower bound of its need: it was ended there.
    """
    kills, limit = cell.oom_kills(), cell.limit
    if not kills or limit is None or cell.hit_limit() is False:
        return None
    by = f"its cgroup (v{cell.version}, {kills} OOM kill{'s' if kills > 1 else ''})"
    return Outgrown(name, "ram", allowance, limit, cell.peak(), by)


def sacrificed(name: str, cell: Cell, allowance: int) -> LoadFailed | None:
    """Return the error for a worker that the kernel ended within its limit, for want of memory outside it.

    None when there was no OOM kill, or it was at the worker's own limit.
    """
    if not cell.oom_kills() or cell.hit_limit() is not False:
        return None
    return LoadFailed(
        f"model {name!r} was ended by the kernel although it kept within its limit of {format_bytes(cell.limit)}: "
        f"the machine, or a cgroup around Pagein, ran out of memory; its peak was {format_bytes(cell.peak())}",
        hint="lower `budget`, or end what else takes memory: the kernel log names it",
        model=name,
        pool="ram",
        allowance_bytes=allowance,
        limit_bytes=cell.limit,
        peak_bytes=cell.peak(),
    )
