"""The threads in which the tasks of a split model are computed, one request in each at a time."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from pagein.engines.local.compute import Computed, hand_over

T = TypeVar("T")


class CalledOff(Exception):
    """Nobody waits for the answer any more; raised in the thread that computes it."""


class Crew:
    """Some daemon threads and the work that waits for one of them: the end of the process waits for none."""

    def __init__(self, threads: int) -> None:
        self.beats = 0
        """Layers and steps computed since the start; as several threads count, some may be lost."""
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._mine = threading.local()
        self._threads = threads
        for number in range(threads):
            threading.Thread(target=self._work, name=f"compute-{number}", daemon=True).start()

    def watch(self, model: nn.Module) -> None:
        """Let every layer of a model be a sign of life, and a place where work that was called off ends."""
        layers = {id(one): one for module in model.modules() if isinstance(module, nn.ModuleList) for one in module}
        for layer in layers.values():
            layer.register_forward_pre_hook(self._on_layer)

    def put(self, job: Callable[[], None]) -> None:
        """Do it in the next thread that is free; any thread."""
        self._jobs.put(job)

    async def run(self, work: Callable[[Callable[[], bool]], T]) -> Computed[T]:
        """Run ``work(abandoned)`` in a thread and wait for it; see `hand_over`."""
        return await hand_over(work, self.put)

    @contextmanager
    def unless(self, left: Callable[[], bool]) -> Iterator[None]:
        """Let the work of this thread end, with CalledOff, at the first step after ``left`` has turned true."""
        self._mine.left = left
        try:
            self.step()
            yield
        finally:
            self._mine.left = None

    def waits(self, left: Callable[[], bool]) -> bool:
        """Whether to wait on for memory, asked of who waits: that is bounded, and a sign of life."""
        self.beats += 1
        return not left()

    def step(self) -> None:
        """Count a step; raises CalledOff."""
        self.beats += 1
        left = getattr(self._mine, "left", None)
        if left is not None and left():
            raise CalledOff

    def stop(self) -> None:
        """End each thread after what it does now; what still waits is never done."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _on_layer(self, module: Any, inputs: Any) -> None:
        self.step()

    def _work(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while (job := self._jobs.get()) is not None:
            job()
            del job  # what it holds of an answer must not wait for the next request
