"""Keeps a part's memory on a device until the kernels that read it have ended: calls end before their kernels do."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Order(Protocol):
    """What the runtime tells of a part on a device, and asks before its memory goes."""

    def landed(self) -> None:
        """Wait until the copies of a load have ended: calls on other streams then find the part whole."""
        ...

    def used(self, part: str) -> None:
        """Note that a call, whose kernels may still run, has ended its use."""
        ...

    def wait(self, part: str) -> None:
        """Return once nothing on the device reads the part any more."""
        ...


class OnHost:
    """An operation on a CPU has ended when it returns."""

    def landed(self) -> None:
        """Do nothing."""

    def used(self, part: str) -> None:
        """Do nothing."""

    def wait(self, part: str) -> None:
        """Do nothing."""


class OnDevice:
    """Events of the streams that used each part, the last of each stream."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._events: dict[str, dict[Any, Any]] = {}

    def landed(self) -> None:
        """Wait for the copies that the calling thread asked for."""
        event = self._cuda.Event(blocking=True)
        event.record(self._cuda.current_stream(self._device))
        event.synchronize()

    def used(self, part: str) -> None:
        """Record where the calling thread's stream is now."""
        stream = self._cuda.current_stream(self._device)
        event = self._cuda.Event(blocking=True)
        event.record(stream)
        self._events.setdefault(part, {})[stream] = event

    def wait(self, part: str) -> None:
        """Wait for the last use on each stream."""
        for event in self._events.pop(part, {}).values():
            event.synchronize()


def order_on(device: torch.device) -> Order:
    """Return the order that a device needs."""
    return OnHost() if device.type == "cpu" else OnDevice(device)
