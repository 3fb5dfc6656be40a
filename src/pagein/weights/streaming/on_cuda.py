"""Weights on a CUDA device: copied there on a stream of its own, while the block before still computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pagein.kv.tiers.lanes import page_lock
from pagein.memory.buffers import Buffer
from pagein.weights.planning.device_memory import DeviceMemory
from pagein.weights.reading.layout import Move
from pagein.weights.streaming.binding import Bound
from pagein.weights.streaming.ring import Slot
from pagein.weights.streaming.stage import flat_view

SCRATCH = 128 * 1024**2
"""Bytes that computing takes beside activations, an upper estimate: packed weights that are being dequantised (64 MiB,
`packed_matmul`), and what torch's allocator has taken from the device and not filled, in pieces of 20 MiB."""


class OnCuda:
    """Copies each slot to the device on a stream of its own, while the block before it still computes.

    Two events a slot keep order: a copy begins once the kernels that read the slot's device memory have ended, and a
    host buffer is read into again once its copy has ended. Host buffers are registered (page-locked), so that copies
    run beside everything else. On the device each tensor begins as aligned as torch's own, so that the same kernels
    are chosen for it as after a full load.
    """

    alignment: int | None = 512
    """Where torch's allocator begins tensors; a safetensors file aligns them to 8 bytes."""
    grain = 2 * 1024**2
    """What torch's allocator rounds to (from 10 MiB up)."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, memory: DeviceMemory | None = None) -> None:
        self.device = device
        self._cuda = cuda
        self._memory = memory or DeviceMemory(device, cuda)
        self._copies = cuda.Stream(device=device)
        self._slots: dict[int, _OnDevice] = {}

    def runtime(self) -> int:
        """Return what the process has on the device (context, libraries, other models), and the scratch."""
        self._cuda.empty_cache()
        return self._memory.mine() + SCRATCH

    def free(self) -> int:
        """Return what is free on the device, and what the process has already."""
        self._cuda.empty_cache()
        return self._memory.free() + self._memory.mine()

    def products(self, dtype: torch.dtype) -> float | None:
        """Return None: the first passes will tell."""
        return None

    def keep(self, buffer: Buffer, bound: Bound) -> tuple[torch.Tensor, Buffer | None]:
        """Copy the bytes to the device and give the host's memory back."""
        kept = _room(buffer.nbytes, self.device)
        _copy(flat_view(buffer), kept, bound.moves, beside=False)
        buffer.close()
        return kept, None

    def open(self, slots: Sequence[Slot]) -> None:
        """Take a place on the device for each slot: nothing is allocated between passes."""
        for slot in slots:
            self._slots[slot.index] = _OnDevice(slot.buffer, self.device, self._cuda)

    def land(self, slot: Slot, bound: Bound) -> torch.Tensor:
        """Start the copy and let what computes next wait for it; the processor goes on at once."""
        there = self._slots[slot.index]
        with self._cuda.stream(self._copies):
            self._copies.wait_event(there.computed)
            _copy(there.host, there.flat, bound.moves, beside=True)
            there.copied.record(self._copies)
        self._cuda.current_stream(self.device).wait_event(there.copied)
        return there.flat

    def leave(self, slot: Slot) -> None:
        """Note the end of the kernels, and wait for the copy before the host buffer is used again."""
        there = self._slots[slot.index]
        there.computed.record(self._cuda.current_stream(self.device))
        there.copied.synchronize()

    def close(self) -> None:
        """Wait for the device, then release the slots."""
        if self._slots:
            self._cuda.synchronize(self.device)
        for there in self._slots.values():
            there.release()
        self._slots.clear()

    def trim(self) -> None:
        """Give back what torch's allocator holds and nothing uses."""
        self._cuda.empty_cache()


class _OnDevice:
    """One slot's copy on the device, and the two events that guard it."""

    def __init__(self, buffer: Buffer, device: torch.device, cuda: Any) -> None:
        self.host = flat_view(buffer)
        self.flat = _room(buffer.nbytes, device)
        self._unlock = page_lock(device, cuda)(self.host)
        self.copied = cuda.Event(blocking=True)  # the host sleeps until then: reads need the processor
        self.computed = cuda.Event()
        # The memory may be that of a tensor that just went, and kernels that use it still be queued.
        self.computed.record(cuda.current_stream(device))

    def release(self) -> None:
        if self._unlock is not None:
            self._unlock()


def _room(nbytes: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def _copy(host: torch.Tensor, flat: torch.Tensor, moves: Sequence[Move], *, beside: bool) -> None:
    for move in moves:
        source = host[move.begin : move.begin + move.nbytes]
        flat[move.into : move.into + move.nbytes].copy_(source, non_blocking=beside)
