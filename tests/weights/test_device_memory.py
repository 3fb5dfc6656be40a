"""What a process has on a device: as the driver tells, else by difference, else all that anybody has."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagein.weights.planning.device_memory import DeviceMemory

from .fake_cuda import MIB, Cuda, NoNvml, device

pytestmark = pytest.mark.torch

CARD = json.loads((Path(__file__).parents[1] / "fixtures" / "nvidia" / "rtx4090.json").read_text())["devices"][0]
TOTAL, USED = CARD["memory"]["total"], CARD["memory"]["used"]


class Nvml:
    """Answers for one captured card; ``mine`` is what it says of this process, None where it shows nothing of it."""

    def __init__(self, mine: int | None = None, used: int = USED) -> None:
        self.mine, self.used = mine, used

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> str:
        return str(CARD["name"])

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(total=TOTAL, free=TOTAL - self.used, used=self.used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        shown = [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in CARD["compute"]]
        ours = [] if self.mine is None else [SimpleNamespace(pid=os.getpid(), usedGpuMemory=self.mine)]
        return [one for one in shown if one.pid != os.getpid()] + ours


@pytest.fixture(autouse=True)
def _all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_the_driver_s_figure_of_the_process_counts() -> None:
    """It has the context, which torch does not count."""
    assert DeviceMemory(device(), Cuda(), Nvml(mine=512 * MIB)).mine() == 512 * MIB


def test_where_the_driver_is_silent_the_difference_since_before_counts() -> None:
    """In a container no process is shown: what is taken more than before the first use is ours."""
    cuda = Cuda(total=TOTAL, taken=USED + 500 * MIB)
    assert DeviceMemory(device(), cuda, Nvml()).mine() == 500 * MIB


def test_a_figure_below_what_torch_holds_is_another_process_s() -> None:
    """A container's process number may be another process's outside."""
    cuda = Cuda(total=TOTAL, taken=USED + 700 * MIB)
    cuda.reserved = 600 * MIB
    assert DeviceMemory(device(), cuda, Nvml(mine=5 * MIB)).mine() == 700 * MIB


@pytest.mark.parametrize("initialized", [True, False])
def test_where_nothing_is_known_all_that_is_taken_counts(initialized: bool) -> None:
    """Never too little: without a reading from before the first use, everybody's bytes are ours."""
    cuda = Cuda(total=TOTAL, taken=900 * MIB)
    cuda.initialized = initialized
    nvml = Nvml() if initialized else NoNvml()
    assert DeviceMemory(device(), cuda, nvml).mine() == 900 * MIB
    assert DeviceMemory(device(), cuda, nvml).free() == TOTAL - 900 * MIB


def test_a_second_model_still_knows_what_others_had_before() -> None:
    """The reading from before the process's first use holds for every later one."""
    cuda, nvml = Cuda(total=TOTAL, taken=USED + 500 * MIB), Nvml()
    DeviceMemory(device(), cuda, nvml)
    cuda.initialized, cuda.taken = True, USED + 900 * MIB
    assert DeviceMemory(device(), cuda, nvml).mine() == 900 * MIB
