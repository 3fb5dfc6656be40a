"""Where torch computes for a model: the device as this process sees it, its pool, and a bound that is kept there."""

from __future__ import annotations

from typing import Any

import torch

from pagein.errors import EngineMissing
from pagein.protocol import WorkerSpec
from pagein.weights.planning.plan import Plan
from pagein.weights.streaming.on_cuda import SCRATCH


def device_of(spec: WorkerSpec) -> str:
    """Return torch's name of the device of a model: the daemon shows a worker its own GPU only, so that is number 0.

    Raises EngineMissing where the installed torch sees no GPU.
    """
    if spec.device == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise EngineMissing(
            f"model {spec.name!r} is set to {spec.device}, but torch {torch.__version__} sees no CUDA device",
            hint="install a build of torch for CUDA and a driver that it can use, or set device: cpu",
        )
    return "cuda:0"


def pool_of(spec: WorkerSpec) -> str:
    """Return the pool that the weights are in, by the daemon's name of it."""
    return "ram" if spec.device == "cpu" else spec.device


class Bound:
    """Keeps torch's allocator on a CUDA device within a model's allowance; nothing on a CPU.

    A cache that grows token by token leaves pieces of many sizes behind, which the allocator keeps. At its bound it
    gives them back to the device first, and only then raises its OutOfMemoryError, which ends one request.
    """

    def __init__(self, device: str, cuda: Any = None) -> None:
        self._device = None if device == "cpu" else torch.device(device)
        self._cuda = torch.cuda if cuda is None else cuda

    def lift(self) -> None:
        """Let it take what the device has, while a plan is carried out that keeps count itself."""
        if self._device is not None:
            self._cuda.set_per_process_memory_fraction(1.0, self._device)

    def set(self, allowance: int | None, plan: Plan) -> None:
        """Let it have the allowance in bytes, less what the process has on the device beside torch; None = no bound."""
        if self._device is None or allowance is None:
            return
        beside = plan.runtime - SCRATCH  # `OnCuda.runtime`: context and libraries, before any weight
        total = int(self._cuda.mem_get_info(self._device)[1])
        share = min(max(allowance, plan.total) - beside, total) / total
        self._cuda.set_per_process_memory_fraction(share, self._device)
