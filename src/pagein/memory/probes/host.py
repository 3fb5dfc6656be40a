"""The machine at one moment: physical memory, every cgroup limit, GPUs and signs of pressure as one snapshot."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from pagein.errors import PageinError
from pagein.memory.probes import cgroup, darwin, linux, nvidia
from pagein.memory.snapshot import MachineSnapshot, PoolReading, Pressure


def read_machine(root: Path = Path("/")) -> MachineSnapshot:
    """Return what this machine has now. ``root`` lets tests read a captured tree (which has no GPUs).

    A few small file reads on Linux, two commands on macOS. Raises PageinError where the total memory cannot be read.
    """
    here = root == Path("/")
    if here and sys.platform == "darwin":
        return darwin.read_machine()
    host, levels = linux.read_host(root), cgroup.read_levels(root)
    return combine(host, levels, nvidia.read_here() if here else [], _pressure(root, host.total, levels))


def combine(
    host: linux.HostMemory,
    levels: Sequence[cgroup.Level],
    devices: Sequence[nvidia.GpuDevice],
    pressure: Pressure,
) -> MachineSnapshot:
    """Put the readings together: the smallest total and, separately, the smallest available of machine and cgroups."""
    if host.total is None:
        raise PageinError("cannot tell how much memory this machine has: /proc/meminfo gives no MemTotal")
    pools = {"ram": _ram(host, host.total, levels)}
    for device in devices:
        if device.total is not None:  # an integrated GPU has none
            source = device.name or "GPU memory"
            pools[device.pool] = PoolReading(device.pool, device.total, device.free, source)
    return MachineSnapshot(
        pools=pools,
        unified=any(device.unified for device in devices),
        swap_total=host.swap_total,
        swap_used=host.swap_used,
        pressure=pressure,
        swapped_in=host.swapped_in,
        swapped_out=host.swapped_out,
    )


def binding_level(total: int | None, levels: Sequence[cgroup.Level]) -> cgroup.Level | None:
    """Return the cgroup that sets the total, or None where physical memory does."""
    limited = [(level.limit.bytes, level) for level in levels if level.limit is not None]
    tightest = min(limited, key=lambda pair: pair[0], default=None)
    return None if tightest is None or (total is not None and tightest[0] >= total) else tightest[1]


def _ram(host: linux.HostMemory, total: int, levels: Sequence[cgroup.Level]) -> PoolReading:
    available = [host.available, *(level.available for level in levels if level.limit is not None)]
    known = [value for value in available if value is not None]
    source = "memory of the WSL2 virtual machine" if host.wsl else "physical memory"
    level = binding_level(total, levels)
    if level is not None and level.limit is not None:
        total, source = level.limit.bytes, f"cgroup {level.path} {level.limit.file}"
    # One unknown among the limits makes the smallest of them unknown: the others are only upper bounds.
    return PoolReading("ram", total, min(known) if len(known) == len(available) else None, source)


def _pressure(root: Path, total: int | None, levels: Sequence[cgroup.Level]) -> Pressure:
    """Stalls of the cgroup that limits us, where one of v2 does; else, and for v1, those of the whole machine."""
    level = binding_level(total, levels)
    if level is not None:
        inside = linux.read_pressure(linux.path_in(level.directory, "memory.pressure"))
        if inside.some_avg10 is not None:
            return inside
    return linux.read_pressure(linux.path_in(root, "proc/pressure/memory"))
