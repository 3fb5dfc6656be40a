"""Captured machines.

`cgroup/hybrid` and `proc/thrash.txt` were captured on a virtual machine, with names changed. The other trees and texts
were written by hand in the kernel's, NVML's and macOS's own formats.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

FIXTURES = Path(__file__).parents[1] / "fixtures"


class NvmlError(Exception):
    """Stands for pynvml.NVMLError: a number and words."""

    def __init__(self, value: int) -> None:
        super().__init__({3: "Not Supported", 4: "Insufficient Permissions", 15: "GPU is lost"}[value])
        self.value = value


class ReplayedNvml:
    """Answers NVML's calls from a captured file; a bare number there is the error that the call raises."""

    def __init__(self, devices: list[dict[str, Any]]) -> None:
        self.devices = devices

    @staticmethod
    def _answer(value: Any) -> Any:
        if isinstance(value, int):
            raise NvmlError(value)
        return value

    def nvmlDeviceGetCount(self) -> int:
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        slices = [part for device in self.devices for part in device.get("slices", ()) if part]
        return next(part for part in slices if part["uuid"] == uuid)

    def nvmlDeviceGetName(self, handle: Any) -> str:
        return self._answer(handle["name"])

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        return self._answer(handle["uuid"])

    def nvmlDeviceGetMemoryInfo(self, handle: Any) -> SimpleNamespace:
        return SimpleNamespace(**self._answer(handle["memory"]))

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        return self._answer(handle["mig"])

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any) -> int:
        return len(handle["slices"])

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        return self._answer(handle["slices"][index] or 3)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in self._answer(handle["compute"])]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=p, usedGpuMemory=used) for p, used in self._answer(handle["graphics"])]


@pytest.fixture
def fixtures() -> Path:
    """Where the captured machines are."""
    return FIXTURES


@pytest.fixture
def replay():
    """A function from the name of a captured machine to its NVML."""
    return lambda name: ReplayedNvml(json.loads((FIXTURES / "nvidia" / f"{name}.json").read_text())["devices"])
