"""Bytes of the measured process: the highest resident size since a moment, and what the device's allocator had."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

import torch

_PROC = Path("/proc/self")


class Peak:
    """The most bytes since it was made. Linux: exact (the kernel's own high-water mark, set back)."""

    def __init__(self, device: str) -> None:
        self._cuda = torch.device(device) if device.startswith("cuda") else None
        with contextlib.suppress(OSError):
            (_PROC / "clear_refs").write_text("5")  # sets VmHWM back: Documentation/filesystems/proc.rst, 3.9
        self.base = _status("VmRSS")
        """Bytes resident then; None where the system does not tell."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self._device_base = torch.cuda.memory_allocated(self._cuda)

    def told(self) -> dict[str, Any]:
        """Return bytes: of the process, and of the device where there is one."""
        peak = _status("VmHWM")
        if peak is None:
            unit = 1 if sys.platform == "darwin" else 1024
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        told: dict[str, Any] = {
            "base_bytes": self.base,
            "peak_bytes": peak,
            "added_bytes": None if self.base is None else peak - self.base,
        }
        if self._cuda is not None:
            told["device_base_bytes"] = self._device_base
            told["device_peak_bytes"] = torch.cuda.max_memory_allocated(self._cuda)
            told["device_reserved_peak_bytes"] = torch.cuda.max_memory_reserved(self._cuda)
        return told


def _status(name: str) -> int | None:
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), None)
