"""Where a model computes: the configured device made concrete for this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pagein.catalog.model import Need
from pagein.memory.snapshot import MachineSnapshot, PoolReading


class Choice(NamedTuple):
    """A device, and why it cannot be used here, or None."""

    device: str
    problem: str | None = None


def choose_device(
    wanted: str,
    engine: str,
    machine: MachineSnapshot,
    *,
    may_choose_gpu: bool,
    can_use_gpu: Callable[[], bool],
    need_on: Callable[[str], Need],
) -> Choice:
    """Resolve ``cpu``, ``gpu``, ``cuda:N`` and ``auto``.

    ``auto`` takes the GPU with the most available memory whose total holds the need, where the engine may be put on one
    (``may_choose_gpu``) and its build can use it; else the CPU. On a machine whose CPU and GPU share one memory,
    ``auto`` is the CPU, and the GPU is used by asking for it: all bytes are then those of ``ram``.
    """
    gpus = sorted(
        (pool for name, pool in machine.pools.items() if name.startswith("cuda:")), key=_available, reverse=True
    )
    if wanted == "cpu":
        return Choice("cpu")
    if wanted == "auto":
        fitting = [pool for pool in gpus if need_on(pool.name).bytes.get(pool.name, 0) <= pool.total]
        return Choice(fitting[0].name if fitting and may_choose_gpu and can_use_gpu() else "cpu")
    if not gpus and not machine.unified:
        return Choice("cpu", f"device is {wanted}, but no GPU was found here")
    device = wanted if wanted != "gpu" else (gpus[0].name if gpus else "cuda:0")
    if device not in machine.pools and not (machine.unified and device == "cuda:0"):
        return Choice(device, f"device is {device}, but this machine has {', '.join(sorted(machine.pools))}")
    if not can_use_gpu():
        return Choice(device, f"device is {wanted}, but the installed build of the engine {engine} has no GPU code")
    return Choice(device)


def _available(pool: PoolReading) -> int:
    return pool.available if pool.available is not None else pool.total
