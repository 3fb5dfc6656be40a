"""From what the machine has and what was configured to one budget per pool, and to what can be had now."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pagein.errors import ConfigError
from pagein.memory.snapshot import MachineSnapshot, PoolReading
from pagein.units import format_bytes

DEFAULT_SHARE = 0.9
"""Share of a pool that Pagein takes unless told otherwise; the rest is for the system and everybody else."""


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """What Pagein may take of one pool."""

    name: str
    bytes: int
    source: str
    """What set it, for people: ``configured 700 MiB``, ``90 % of cgroup /x memory.max``."""


def resolve_budgets(snapshot: MachineSnapshot, configured: Mapping[str, int | float]) -> dict[str, PoolBudget]:
    """Return a budget for every pool of the machine: the configured size (int) or share (float), else 90 %.

    Raises ConfigError, with every fault at once, for a pool that is not here and for more than a pool has.
    """
    faults = [_unknown(name, snapshot) for name in configured if name not in snapshot.pools]
    budgets = {}
    for name, pool in snapshot.pools.items():
        wish = configured.get(name)
        fault = None if wish is None else _fault(pool, wish)
        if fault is not None:
            faults.append(fault)
        else:
            budgets[name] = _budget(pool, wish)
    if faults:
        raise ConfigError("\n".join(faults), hint="`pagein doctor` lists the pools and their sizes")
    return budgets


def less_mapped(snapshot: MachineSnapshot, mapped: int) -> MachineSnapshot:
    """Return the machine with ``mapped`` bytes less of RAM available: the file pages that our workers have mapped.

    The kernel counts page cache as available, mapped weights too (MemAvailable, a cgroup's reclaimable bytes). For
    admission they are taken: the books hold them for their model, and dropping them stalls it on its file. Pressure is
    judged without this: giving up clean pages hurts nobody else, and what it does to our own models shows as stalls.
    """
    ram = snapshot.pools.get("ram")
    if ram is None or ram.available is None:
        return snapshot
    left = replace(ram, available=max(0, ram.available - mapped))
    return replace(snapshot, pools={**snapshot.pools, "ram": left})


def _budget(pool: PoolReading, wish: int | float | None) -> PoolBudget:
    if isinstance(wish, int):
        return PoolBudget(pool.name, wish, f"configured {format_bytes(wish)}")
    share = DEFAULT_SHARE if wish is None else wish
    told = "" if wish is None else "configured "
    return PoolBudget(pool.name, int(pool.total * share), f"{told}{share * 100:.4g} % of {pool.source}")


def _fault(pool: PoolReading, wish: int | float) -> str | None:
    key = f"budget.{pool.name}"
    if isinstance(wish, float):
        share = f"{wish * 100:.4g} %"
        return None if 0 < wish <= 1 else f"{key}: a share lies above 0 % and at most 100 %, not at {share}"
    asked, there = format_bytes(wish), format_bytes(pool.total)
    if wish <= 0:
        return f"{key}: {asked} holds no model; {pool.source} has {there}"
    if wish > pool.total:
        if asked == there:  # the same when rounded
            asked, there = f"{wish} bytes", f"{pool.total} bytes"
        return f"{key}: {asked} is more than there is: {pool.source} has {there}"
    return None


def _unknown(name: str, snapshot: MachineSnapshot) -> str:
    known = ", ".join(snapshot.pools)
    why = "; its GPU shares this memory" if snapshot.unified and name.startswith("cuda:") else ""
    return f"budget.{name}: this machine has no such pool; it has {known}{why}"
