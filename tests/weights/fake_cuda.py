"""A stand-in for torch.cuda: notes streams and events; the copies themselves happen at once, in the host's memory."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import torch

MIB = 1024**2


class Stream:
    """Notes what is asked of it."""

    def __init__(self, log: list[Any], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: Any) -> None:
        self.log.append((self.name, "waits", event.name))


class Event:
    """Has a number."""

    def __init__(self, log: list[Any], name: str) -> None:
        self._log, self.name = log, name

    def record(self, stream: Stream) -> None:
        self._log.append((stream.name, "records", self.name))

    def synchronize(self) -> None:
        self._log.append(("host", "waits", self.name))


class Cuda:
    """What `OnCuda` and `DeviceMemory` use of torch.cuda; ``register`` is the answer of cudaHostRegister."""

    def __init__(self, register: int = 0, total: int = 1 << 50, taken: int = 400 * MIB) -> None:
        self.log: list[Any] = []
        self.compute = Stream(self.log, "compute")
        self.registered: list[int] = []
        self.total, self.taken, self.reserved, self.initialized = total, taken, 0, False
        self._register, self._events = register, 0

    def Stream(self, device: Any) -> Stream:
        return Stream(self.log, "copies")

    def Event(self, blocking: bool = False) -> Event:
        self._events += 1
        return Event(self.log, f"event{self._events}")

    def current_stream(self, device: Any) -> Stream:
        return self.compute

    def synchronize(self, device: Any) -> None:
        self.log.append(("device", "synchronize"))

    def empty_cache(self) -> None:
        self.log.append(("device", "empties"))

    def is_initialized(self) -> bool:
        return self.initialized

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return self.total - self.taken, self.total

    def is_available(self) -> bool:
        return True

    def set_per_process_memory_fraction(self, share: float, device: Any) -> None:
        self.log.append(("allocator", "may have", round(share * self.total)))

    def memory_reserved(self, device: Any) -> int:
        return self.reserved

    @contextmanager
    def device(self, device: Any) -> Any:
        yield

    @contextmanager
    def stream(self, stream: Stream) -> Any:
        yield

    def cudart(self) -> Any:
        outer = self

        class Runtime:
            @staticmethod
            def cudaHostRegister(pointer: int, size: int, flags: int) -> int:
                if outer._register == 0:
                    outer.registered.append(pointer)
                return outer._register

            @staticmethod
            def cudaHostUnregister(pointer: int) -> int:
                outer.registered.remove(pointer)
                return 0

        return Runtime


class NoNvml:
    """A driver that answers nothing."""


def device() -> torch.device:
    """Where the stand-in computes."""
    return torch.device("cpu")
