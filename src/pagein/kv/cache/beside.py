"""Bytes of the device that are no blocks: counted in its budget before they are allocated."""

from __future__ import annotations

from pagein.kv.cache.device import DeviceTier


class Beside:
    """What one owner has: side state, or rows that are gathered for a pass."""

    def __init__(self, device: DeviceTier, what: str) -> None:
        self._device, self._what = device, what
        self.size = 0
        """Bytes that are counted for it."""

    def hold(self, size: int) -> None:
        """Have so many counted instead; KvFull, with the former ones counted, where no room can be made for more."""
        if size > self.size:
            self._device.set_aside(size - self.size, self._what)
        elif size < self.size:
            self._device.give_back(self.size - size)
        self.size = size

    def could_hold(self, size: int) -> bool:
        """The same without asking anybody to leave, for who has the lock; False, and nothing changed, if it lacks."""
        if size > self.size and not self._device.could_set_aside(size - self.size):
            return False
        self._device.give_back(max(self.size - size, 0))
        self.size = size
        return True

    def free(self) -> None:
        """Have none any more. Idempotent."""
        self.hold(0)
