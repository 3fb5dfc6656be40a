"""Bytes of a CUDA device: what this process has of them, its context included, and what is free.

torch counts what its own allocator took. The context, its kernels and the libraries' workspaces (some 300 to 600 MiB)
are seen by the driver alone.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch

from pagein.memory.probes.nvidia import GpuDevice, open_nvml, process_bytes, read_devices


class DeviceMemory:
    """Reads one device's memory; if made before the process's first use of CUDA, it also knows what others have."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, nvml: Any = None) -> None:
        self._device, self._cuda = device, cuda
        self._nvml = nvml if nvml is not None else open_nvml()
        self._others = _before_first_use(device, cuda, self._nvml)
        _warm_up(device)
        cuda.synchronize(device)

    def free(self) -> int:
        """Return the bytes that nobody has."""
        return int(self._cuda.mem_get_info(self._device)[0])

    def mine(self) -> int:
        """Return the bytes that this process has.

        As the driver tells; where it does not, by how much more is taken than before the first use. Where that is
        unknown, too: all that anybody has, never too little.
        """
        reserved, found = int(self._cuda.memory_reserved(self._device)), self._told()
        if found is not None and found > reserved:  # in a container the number of another process may be ours
            return found
        free, total = self._cuda.mem_get_info(self._device)
        taken = int(total) - int(free)
        return taken if self._others is None else max(taken - self._others, reserved)

    def _told(self) -> int | None:
        card = _card(self._nvml, self._device)
        if card is None:
            return None
        return process_bytes(self._nvml, [card]).get(card.pool, {}).get(os.getpid())


@functools.cache
def _before_first_use(device: torch.device, cuda: Any, nvml: Any) -> int | None:
    """Bytes that other processes had when this one had none: read once; None where it was not read in time."""
    card = None if cuda.is_initialized() else _card(nvml, device)
    if card is None or card.total is None or card.free is None:
        return None
    return card.total - card.free


def _card(nvml: Any, device: torch.device) -> GpuDevice | None:
    """The device as NVML describes it; None where its number there may be another's (`nvidia`)."""
    cards = read_devices(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    alike = len({card.name for card in cards}) == 1 or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
    return next((card for card in cards if alike and card.index == (device.index or 0)), None)


def _warm_up(device: torch.device) -> None:
    """Compute a little, so that what comes with the first product is there and is counted."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(64, 64, dtype=dtype, device=device)
        torch.nn.functional.linear(square, square)
