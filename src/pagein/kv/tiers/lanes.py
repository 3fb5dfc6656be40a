"""The way between a device's blocks and host memory: on a CPU a copy, on CUDA a stream of its own with events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

import torch

_PORTABLE = 1
"""cudaHostRegisterPortable: page-locked for every device."""


class Landing(Protocol):
    """A point that copies upwards have reached."""

    def wait(self) -> None:
        """Let what computes next find the bytes there; on a device the processor goes on at once."""
        ...


class Lane(Protocol):
    """Copies of one device, from any thread."""

    def computed(self) -> Any:
        """Note the end of what the device was asked to compute so far: copies that are given it begin after it."""
        ...

    def down(self, pack: Callable[[], Any], into: Any, after: Any) -> None:
        """Run ``pack`` (a flat tensor on the device) and copy it to host memory; returns once the copy is done.

        Only then may the blocks be written by others.
        """
        ...

    def up(self, flat: Any, unpack: Callable[[Any], None], after: Any) -> None:
        """Copy a flat tensor of host memory to the device and let ``unpack`` spread it there.

        ``flat`` may be written again once a `Landing` that was made afterwards is done (`settle`).
        """
        ...

    def landing(self) -> Landing:
        """Return the point that all `up` calls so far have reached."""
        ...

    def settle(self) -> None:
        """Wait until all copies are done."""
        ...


class CpuLane:
    """The device is host memory: a copy is done when it returns."""

    def computed(self) -> Any:
        """Nothing computes behind the processor's back."""
        return None

    def down(self, pack: Callable[[], Any], into: Any, after: Any) -> None:
        """Copy at once."""
        into.copy_(pack())

    def up(self, flat: Any, unpack: Callable[[Any], None], after: Any) -> None:
        """Spread at once."""
        unpack(flat)

    def landing(self) -> Landing:
        """All is there."""
        return _Here()

    def settle(self) -> None:
        """All is done."""


class _Here:
    def wait(self) -> None:
        """Nothing to wait for."""


class CudaLane:
    """Copies on a stream of their own. ``cuda`` is torch.cuda, or a stand-in for tests.

    Down: the stream waits for the kernels that wrote the blocks (``after``), and the thread that asked waits for the
    copy's event, so that a block is free only once its bytes are elsewhere. Up: the stream waits for the kernels that
    still read the blocks' former content, and each layer's event is waited for by the compute stream just before the
    layer is used.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._copies = cuda.Stream(device=device)
        self._queueing = threading.Lock()

    def computed(self) -> Any:
        """Record an event on the stream that computes in this thread."""
        event = self._cuda.Event()
        event.record(self._cuda.current_stream(self._device))
        return event

    def down(self, pack: Callable[[], Any], into: Any, after: Any) -> None:
        """Pack on the device, copy to the host, wait."""
        done = self._cuda.Event(blocking=True)  # the host sleeps meanwhile: others need the processor
        with self._queueing, self._cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            packed = pack()
            into.copy_(packed, non_blocking=True)
            done.record(self._copies)
        done.synchronize()

    def up(self, flat: Any, unpack: Callable[[Any], None], after: Any) -> None:
        """Queue the copy and what spreads it; the host goes on."""
        with self._queueing, self._cuda.stream(self._copies):
            if after is not None:
                self._copies.wait_event(after)
            unpack(flat.to(self._device, non_blocking=True))

    def landing(self) -> Landing:
        """Record an event behind all copies so far."""
        event = self._cuda.Event()
        event.record(self._copies)
        return _OnStream(event, self._device, self._cuda)

    def settle(self) -> None:
        """Wait for the copies' stream."""
        event = self._cuda.Event(blocking=True)
        event.record(self._copies)
        event.synchronize()


class _OnStream:
    def __init__(self, event: Any, device: torch.device, cuda: Any) -> None:
        self._event, self._device, self._cuda = event, device, cuda

    def wait(self) -> None:
        """Let the compute stream wait."""
        self._cuda.current_stream(self._device).wait_event(self._event)


def page_lock(device: torch.device, cuda: Any = torch.cuda) -> Callable[[torch.Tensor], Callable[[], None] | None]:
    """Return what page-locks a flat uint8 tensor for copies to a device, and itself returns what unlocks it.

    Refused (memory may not be locked), it returns None: copies are then only slower.
    """
    runtime = cuda.cudart()

    def lock(flat: torch.Tensor) -> Callable[[], None] | None:
        pointer = flat.data_ptr()
        with cuda.device(device):
            code = runtime.cudaHostRegister(pointer, flat.numel(), _PORTABLE)
        if int(code) != 0:
            with suppress(RuntimeError):  # the refusal stays CUDA's last error, which the next kernel would raise
                torch.empty(1, dtype=torch.uint8, device=device).zero_()
            return None
        return lambda: runtime.cudaHostUnregister(pointer)

    return lock


def lane_of(device: torch.device) -> Lane:
    """Return the way to a device's blocks."""
    return CudaLane(device) if device.type == "cuda" else CpuLane()
