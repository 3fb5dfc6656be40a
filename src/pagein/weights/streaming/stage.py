"""Where the bytes of a buffer are computed from: the buffer itself on a CPU, a copy of it on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from time import perf_counter
from typing import Protocol

import psutil
import torch

from pagein.errors import ModelUnsuited
from pagein.memory.buffers import Buffer
from pagein.memory.probes.host import read_machine
from pagein.weights.streaming.binding import Bound
from pagein.weights.streaming.ring import Slot

SCRATCH = 48 * 1024**2
"""Bytes that torch's threads and kernels take once they compute; measured on a CPU with two threads."""


class Stage(Protocol):
    """Turns read bytes into a tensor (uint8, one dimension) on the device that computes."""

    device: torch.device
    alignment: int | None
    """Bytes that each tensor's place on the device is a multiple of; None where tensors are used as they were read."""
    grain: int
    """Bytes that memory is taken in: what is kept counts as a multiple of it."""

    def runtime(self) -> int:
        """Bytes that this process has of the device's memory before any weight, and takes once it computes."""

    def free(self) -> int:
        """Bytes that it could have in all."""

    def products(self, dtype: torch.dtype) -> float | None:
        """Bytes of weights that one token is multiplied with in a second; None where nobody measured that."""

    def keep(self, buffer: Buffer, bound: Bound) -> tuple[torch.Tensor, Buffer | None]:
        """Return the bytes on the device for good, and the buffer where they still need it."""

    def open(self, slots: Sequence[Slot]) -> None:
        """Take what the slots of a ring need on the device."""

    def land(self, slot: Slot, bound: Bound) -> torch.Tensor:
        """Return the bytes of a slot that was read; valid until `leave`."""

    def leave(self, slot: Slot) -> None:
        """Say that all that computes from the slot was asked for; returns once it may be read into again."""

    def close(self) -> None:
        """Forget the slots. Idempotent."""

    def trim(self) -> None:
        """Give memory back that nothing uses any more."""


def stage_for(device: str) -> Stage:
    """Return the stage of a device by name; "auto" is the first CUDA device where there is one, else the CPU."""
    from pagein.weights.streaming.on_cuda import OnCuda

    wanted = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else torch.device(device)
    if wanted.type == "cpu":
        return OnCpu()
    if wanted.type == "cuda":
        if not torch.cuda.is_available():
            raise ModelUnsuited(f"device {device!r} was asked for, but torch {torch.__version__} sees no CUDA device")
        if (wanted.index or 0) >= torch.cuda.device_count():
            raise ModelUnsuited(f"device {device!r} was asked for, but torch sees {torch.cuda.device_count()} of them")
        return OnCuda(torch.device("cuda", wanted.index or 0))
    raise ModelUnsuited(f"weights are streamed to cpu and cuda, not to {wanted.type!r}")


@cache
def measure_products(dtype: torch.dtype) -> float:
    """Return the bytes of weights per second in a product with one token: the best of some, in turn of two matrices.

    Together they are larger than the caches of one core's share, as the weights of a model are.
    """
    width, times = 2048, []
    matrices = torch.ones(2, SCRATCH // (2 * width * dtype.itemsize), width, dtype=dtype)
    token = torch.ones(1, width, dtype=dtype)
    with torch.inference_mode():
        for turn in range(8):
            begin = perf_counter()
            torch.nn.functional.linear(token, matrices[turn % 2])
            times.append(perf_counter() - begin)
    return float(matrices[0].nbytes / min(times))


def flat_view(buffer: Buffer) -> torch.Tensor:
    """Return a buffer's bytes as a tensor (uint8), without a copy."""
    # Made in inference mode it could not be written to outside of it.
    with torch.inference_mode(False):
        return torch.frombuffer(buffer.view, dtype=torch.uint8)


def resident_now() -> int:
    """Bytes that this process has in memory now, libraries included."""
    return int(psutil.Process().memory_info().rss)


class OnCpu:
    """Computes from the very bytes that were read."""

    alignment: int | None = None
    grain = 1

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._flats: dict[int, torch.Tensor] = {}

    def runtime(self) -> int:
        """Return what the process has in memory now, and torch's scratch."""
        return resident_now() + SCRATCH

    def free(self) -> int:
        """Return what the machine and every cgroup around the process have available, and what it has already."""
        available = read_machine().pools["ram"].available
        return (int(psutil.virtual_memory().available) if available is None else available) + resident_now()

    def products(self, dtype: torch.dtype) -> float | None:
        """Measure it once in a process for each dtype; takes some ms."""
        return measure_products(dtype)

    def keep(self, buffer: Buffer, bound: Bound) -> tuple[torch.Tensor, Buffer | None]:
        """Return a view of the buffer."""
        return flat_view(buffer), buffer

    def open(self, slots: Sequence[Slot]) -> None:
        """Look into the slots' buffers."""
        self._flats = {slot.index: flat_view(slot.buffer) for slot in slots}

    def land(self, slot: Slot, bound: Bound) -> torch.Tensor:
        """Return the view of the slot's buffer."""
        return self._flats[slot.index]

    def leave(self, slot: Slot) -> None:
        """Do nothing: an operation on a CPU has ended when it returns."""

    def close(self) -> None:
        """Forget the views."""
        self._flats.clear()

    def trim(self) -> None:
        """Do nothing: a closed buffer is given back at once."""
