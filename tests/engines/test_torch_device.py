"""Where torch computes, and the bound that its allocator keeps there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagein.engines.torch_device import Bound, device_of, pool_of
from pagein.errors import EngineMissing
from pagein.protocol import WorkerSpec
from pagein.supervisor.environment import worker_environment
from pagein.weights.planning.demand import Needs, Unit
from pagein.weights.planning.device_memory import DeviceMemory
from pagein.weights.planning.plan import Plan, make_plan
from pagein.weights.streaming.on_cuda import SCRATCH
from tests.weights.fake_cuda import MIB, Cuda, device
from tests.weights.test_device_memory import TOTAL, USED, Nvml

pytestmark = pytest.mark.torch
BESIDE = 300 * MIB


def spec(device: str) -> WorkerSpec:
    """A model that computes there."""
    return WorkerSpec("m", "transformers", "t", "s", device=device)


def plan_in(memory: int) -> Plan:
    """The plan of a small model on a device where the process has 300 MiB beside torch."""
    block = Unit("b", 8 * MIB, 8 * MIB)
    return make_plan(Needs(BESIDE + SCRATCH, MIB, 0, 0, False, (block,) * 4, 0, 16, 1, MIB), memory)


def test_a_worker_sees_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever number it has for the daemon it is the first here; its pool keeps the daemon's name."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (device_of(spec("cuda:3")), pool_of(spec("cuda:3"))) == ("cuda:0", "cuda:3")
    assert (device_of(spec("cpu")), pool_of(spec("cpu"))) == ("cpu", "ram")


class TwoCards(Nvml):
    """The captured card twice: the first one is nearly full, and this process is on the second."""

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        used = self.used if handle == 1 else TOTAL - MIB
        return SimpleNamespace(total=TOTAL, free=TOTAL - used, used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:
        return super().nvmlDeviceGetComputeRunningProcesses(handle) if handle == 1 else []


def test_what_a_worker_has_is_read_from_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Number 1 of the daemon's is number 0 in the worker's environment, for torch and for the driver's figures."""
    environment = worker_environment(spec("cuda:1"), {}, {})
    for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, environment[name])
    assert DeviceMemory(device(), Cuda(total=TOTAL), TwoCards(mine=512 * MIB)).mine() == 512 * MIB
    silent = DeviceMemory(device(), Cuda(total=TOTAL, taken=USED + 500 * MIB), TwoCards())
    assert silent.mine() == 500 * MIB


def test_a_torch_without_a_gpu_is_said_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing falls back to the CPU, whose memory nobody granted."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineMissing, match=r"'m' is set to cuda:3, but torch .* sees no CUDA device"):
        device_of(spec("cuda:3"))


def test_torch_may_have_the_allowance_less_what_is_beside_it() -> None:
    """Context and libraries are on the device, but not in torch's count."""
    cuda = Cuda(total=1 << 40)
    bound = Bound("cuda:0", cuda)
    bound.set(900 * MIB, plan_in(800 * MIB))
    assert cuda.log == [("allocator", "may have", 900 * MIB - BESIDE)]
    bound.lift()
    assert cuda.log[-1] == ("allocator", "may have", 1 << 40)


def test_a_bound_is_never_above_the_device_nor_below_the_plan() -> None:
    """torch refuses a share above 1; a plan that others agreed to must be able to run."""
    cuda, plan = Cuda(total=1 << 30), plan_in(800 * MIB)
    Bound("cuda:0", cuda).set(1 << 40, plan)
    assert cuda.log[-1][2] == 1 << 30
    Bound("cuda:0", cuda).set(1, plan)
    assert cuda.log[-1][2] == plan.total - BESIDE


def test_a_cpu_and_no_allowance_have_no_bound() -> None:
    """On a CPU a cgroup holds the worker; without an allowance there is nothing to hold it to."""
    cuda = Cuda()
    Bound("cpu", cuda).set(900 * MIB, plan_in(800 * MIB))
    Bound("cpu", cuda).lift()
    Bound("cuda:0", cuda).set(None, plan_in(800 * MIB))
    assert cuda.log == []
