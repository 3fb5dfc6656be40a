"""NVIDIA GPUs through NVML (the package ``nvidia-ml-py``, optional): memory per device and per process.

``cuda:N`` is the N-th GPU that a CUDA program sees when it numbers them by PCI bus: NVML's order, narrowed by
CUDA_VISIBLE_DEVICES. Workers must therefore run with CUDA_DEVICE_ORDER=PCI_BUS_ID. Every fault of the driver makes
the fact unknown; nothing here raises.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_NOT_SUPPORTED = 3
"""NVML_ERROR_NOT_SUPPORTED of nvml.h."""

_INTEGRATED = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra\w*)\b", re.IGNORECASE)
"""Products whose GPU has no memory of its own: DGX Spark and its kin, Jetson.

"Not Supported" alone is no proof: MIG slices and some virtual GPUs answer it too. And some set-ups answer for a
GB10 with the system's memory as if it were the GPU's, so the name decides even where a size is given (nvitop
PR 208, nvtop PR 463).
"""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU as NVML describes it now; unknown is None."""

    index: int
    """The N of ``cuda:N``."""
    name: str | None
    total: int | None
    free: int | None
    unified: bool = False
    """True where the GPU uses the machine's own memory."""
    problem: str | None = None
    """Why its memory is unknown, in the driver's words, or None."""
    handle: Any = field(default=None, compare=False, repr=False)

    @property
    def pool(self) -> str:
        """Name of its pool."""
        return f"cuda:{self.index}"


@functools.cache
def open_nvml() -> Any | None:
    """Return the initialised NVML binding, or None where package, library or driver is missing; tried once."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception:  # ImportError, the binding's own errors, a broken shared library: all mean "no GPUs known"
        return None
    return nvml


def read_devices(nvml: Any | None, visible: str | None = None) -> list[GpuDevice]:
    """Return the GPUs that a worker would see; ``visible`` is CUDA_VISIBLE_DEVICES, None when that is unset."""
    if nvml is None:
        return []
    handles = _visible(nvml, _all_handles(nvml), visible)
    return [_describe(nvml, index, _slice_of(nvml, handle)) for index, handle in enumerate(handles)]


def read_here() -> list[GpuDevice]:
    """Return the GPUs of this machine as this process may use them."""
    return read_devices(open_nvml(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def process_bytes(nvml: Any | None, devices: Sequence[GpuDevice]) -> dict[str, dict[int, int | None]]:
    """Return pool → process → bytes of every process that NVML shows, without pools whose list is unknown.

    A container with a process namespace of its own, WSL2 and MIG often show an empty list or no sizes (None).
    """
    pools: dict[str, dict[int, int | None]] = {}
    for device in devices:
        calls = (f"nvmlDeviceGet{kind}RunningProcesses" for kind in ("Compute", "Graphics"))
        lists = [ask(nvml, call, device.handle)[0] for call in calls]
        if all(found is None for found in lists):
            continue
        used: dict[int, int | None] = {}
        # A process that computes and draws stands in both lists with the same figure.
        for process in (entry for found in lists if found is not None for entry in found):
            earlier, now = used.get(process.pid), process.usedGpuMemory
            used[process.pid] = now if earlier is None else max(earlier, now or 0)
        pools[device.pool] = used
    return pools


def ask(nvml: Any, function: str, *arguments: Any) -> tuple[Any | None, str | None, int | None]:
    """Call NVML: the answer, or the driver's words and its error number."""
    try:
        return getattr(nvml, function)(*arguments), None, None
    except Exception as error:  # NVMLError, or AttributeError of an older binding: unknown either way
        return None, str(error) or type(error).__name__, getattr(error, "value", None)


def _all_handles(nvml: Any) -> list[Any]:
    count, _, _ = ask(nvml, "nvmlDeviceGetCount")
    handles = [ask(nvml, "nvmlDeviceGetHandleByIndex", index)[0] for index in range(count or 0)]
    return [handle for handle in handles if handle is not None]


def _visible(nvml: Any, handles: list[Any], visible: str | None) -> list[Any]:
    """Apply CUDA_VISIBLE_DEVICES as CUDA does: in its order, and nothing from the first unknown entry on."""
    if visible is None:
        return handles
    chosen: list[Any] = []
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdigit():
            handle = handles[int(entry)] if int(entry) < len(handles) else None
        else:
            handle = _by_uuid(nvml, handles, entry)
        if handle is None:
            break
        chosen.append(handle)
    return chosen


def _by_uuid(nvml: Any, handles: list[Any], entry: str) -> Any | None:
    if entry.startswith("MIG-"):
        return ask(nvml, "nvmlDeviceGetHandleByUUID", entry)[0]
    if not entry.startswith("GPU-"):
        return None
    uuids = [(handle, _text(ask(nvml, "nvmlDeviceGetUUID", handle)[0])) for handle in handles]
    # CUDA accepts a beginning of the identifier where only one GPU has it.
    found = [handle for handle, uuid in uuids if uuid is not None and uuid.startswith(entry)]
    return found[0] if len(found) == 1 else None


def _slice_of(nvml: Any, handle: Any) -> Any:
    """With MIG on, a CUDA program sees one slice of the card, the first: that slice's memory is the limit."""
    mode, _, _ = ask(nvml, "nvmlDeviceGetMigMode", handle)
    if not mode or mode[0] != 1:
        return handle
    slices, _, _ = ask(nvml, "nvmlDeviceGetMaxMigDeviceCount", handle)
    for index in range(slices or 0):
        found, _, _ = ask(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", handle, index)
        if found is not None:
            return found
    return handle


def _describe(nvml: Any, index: int, handle: Any) -> GpuDevice:
    name = _text(ask(nvml, "nvmlDeviceGetName", handle)[0])
    if name is not None and _INTEGRATED.search(name):
        return GpuDevice(index, name, None, None, unified=True, handle=handle)
    memory, words, number = ask(nvml, "nvmlDeviceGetMemoryInfo", handle)
    if memory is None or memory.total <= 0:
        problem = words or "the driver gives a total of 0 bytes"
        if number == _NOT_SUPPORTED:
            problem = f"{problem} (a MIG slice, a virtual GPU, or an integrated GPU that Pagein does not know)"
        return GpuDevice(index, name, None, None, problem=problem, handle=handle)
    return GpuDevice(index, name, int(memory.total), int(memory.free), handle=handle)


def _text(value: Any) -> str | None:
    """Older bindings return bytes."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else None
