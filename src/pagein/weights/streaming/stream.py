"""Units of the model as the forward pass meets them: hung in before they compute, taken away after.

Who runs a forward pass alone waits here for the ring. Who runs beside others (`lockstep`) lets the hub wait for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import current_thread
from time import perf_counter
from typing import Any

from torch import nn

from pagein.errors import WeightsAway
from pagein.weights.reading.reader import Reader
from pagein.weights.streaming.binding import Bound
from pagein.weights.streaming.ring import Ring
from pagein.weights.streaming.stage import Stage

AWAY = -1
"""Instead of a unit's place: its bytes are neither in memory nor in the stream."""


class Stream:
    """The streamed units in running order and the ring that they pass through."""

    def __init__(
        self,
        reader: Reader,
        stage: Stage,
        units: Sequence[Bound],
        follows: Sequence[int],
        slots: int,
        slot_bytes: int,
    ) -> None:
        self.units = units
        self._stage = stage
        self.ring = Ring(reader, [unit.layout for unit in units], follows, slots, slot_bytes)
        try:
            stage.open(self.ring.slots)
        except BaseException:
            stage.close()
            self.ring.close()
            raise
        self.log: Callable[[str, float, float], None] | None = None
        """Told each unit's name, wait and computing time."""
        self._thread = current_thread()
        self._opened_at = self._ready_at = 0.0

    def open(self, unit: int) -> None:
        """Wait for a unit's bytes and hang them into its module."""
        self._abandon()
        self._thread, self._opened_at = current_thread(), perf_counter()
        slot = self.ring.acquire(unit)
        self.units[unit].attach(self._stage.land(slot, self.units[unit]), slot.index)
        self._ready_at = perf_counter()

    def close_unit(self, unit: int) -> None:
        """Take a unit's tensors away and let the next read into its buffer begin."""
        assert self.ring.used is not None
        self.units[unit].detach()
        self._stage.leave(self.ring.used)
        self.ring.release(unit)
        if self.log is not None:
            self.log(self.units[unit].name, self._ready_at - self._opened_at, perf_counter() - self._ready_at)

    def _abandon(self) -> None:
        """Take away a unit that stayed open: an interrupt (Ctrl-C) passes by the hook that closes it."""
        if (slot := self.ring.used) is None:
            return
        if self._thread is not current_thread() and self._thread.is_alive():
            raise WeightsAway(
                f"two threads compute at once: {self._thread.name} computes with {self.units[slot.unit].name}",
                hint="call the whole model, which lets threads take turns, not a part of it",
            )
        self.units[slot.unit].detach()
        self._stage.leave(slot)
        self.ring.recover()

    def close(self) -> None:
        """Stop reading ahead and give the buffers back; nobody may be computing."""
        self._abandon()
        for unit in self.units:
            unit.forget()
        self._stage.close()
        self.ring.close()


class Gate:
    """Stands before a module: opens its unit where it is streamed, does nothing where it is resident."""

    def __init__(self, module: nn.Module, enter: Callable[[int], None], leave: Callable[[int], None]) -> None:
        self.unit: int | None = None
        """The unit's place in the stream; None while the module is resident, `AWAY` while it cannot compute."""
        self._enter, self._leave = enter, leave
        self._inside = False
        self._hooks = [
            module.register_forward_pre_hook(self._before),
            # Also after an error: a unit that stays open would block the ring.
            module.register_forward_hook(self._after, always_call=True),
        ]

    def _before(self, module: nn.Module, inputs: Any) -> None:
        self._inside = False  # an interrupt may have left it
        if self.unit is not None:
            self._enter(self.unit)
            self._inside = True

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self.unit is not None and self._inside:
            self._inside = False
            self._leave(self.unit)

    def remove(self) -> None:
        """Take the gate away."""
        for hook in self._hooks:
            hook.remove()
