"""The link between a GPU and the machine's memory: what NVML and sysfs say of its PCI Express generation and lanes.

A card at rest trains its link down to save power, so what it can do stands beside what it does now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagein.memory.probes.linux import read_text
from pagein.memory.probes.nvidia import GpuDevice, ask

_GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""Gigatransfers per second of a lane, by which sysfs tells the generation."""
_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes per second of a lane in one direction, line code taken off (PCI Express Base Specification 6.0)."""


@dataclass(frozen=True, slots=True)
class Link:
    """One GPU's link; unknown is None."""

    pool: str
    generation: int | None
    """Now."""
    lanes: int | None
    """Now."""
    most_generation: int | None
    """What card and slot can do together."""
    most_lanes: int | None

    @property
    def bytes_per_second(self) -> float | None:
        """What it can move in one direction at its best, before any overhead of packets."""
        generation = self.most_generation or self.generation
        lanes = self.lanes or self.most_lanes
        return None if generation not in _LANE or lanes is None else _LANE[generation] * lanes

    @property
    def is_narrow(self) -> bool:
        """Whether fewer lanes are in use than the card has: a slot that gives less, a riser, a shared slot."""
        return self.lanes is not None and self.most_lanes is not None and self.lanes < self.most_lanes


def read_links(nvml: Any | None, devices: Sequence[GpuDevice], root: Path = Path("/")) -> list[Link]:
    """Return the link of each GPU that is a card of its own; what NVML does not say is read under ``root``."""
    return [_read(nvml, device, root) for device in devices if not device.unified]


def _read(nvml: Any | None, device: GpuDevice, root: Path) -> Link:
    folder = _folder(nvml, device, root)
    return Link(
        device.pool,
        _number(nvml, "nvmlDeviceGetCurrPcieLinkGeneration", device) or _generation(folder, "current_link_speed"),
        _number(nvml, "nvmlDeviceGetCurrPcieLinkWidth", device) or _lanes(folder, "current_link_width"),
        _number(nvml, "nvmlDeviceGetMaxPcieLinkGeneration", device) or _generation(folder, "max_link_speed"),
        _number(nvml, "nvmlDeviceGetMaxPcieLinkWidth", device) or _lanes(folder, "max_link_width"),
    )


def _number(nvml: Any | None, call: str, device: GpuDevice) -> int | None:
    found = None if nvml is None else ask(nvml, call, device.handle)[0]
    return int(found) if found else None


def _folder(nvml: Any | None, device: GpuDevice, root: Path) -> Path | None:
    """Where sysfs has the card, by the bus address that NVML gives (eight digits of domain; sysfs writes four)."""
    info = None if nvml is None else ask(nvml, "nvmlDeviceGetPciInfo", device.handle)[0]
    address = getattr(info, "busId", None)
    if isinstance(address, bytes):
        address = address.decode(errors="replace")
    if not isinstance(address, str) or address.count(":") != 2:
        return None
    domain, rest = address.lower().split(":", 1)
    return root / "sys/bus/pci/devices" / f"{domain[-4:]}:{rest}"


def _generation(folder: Path | None, file: str) -> int | None:
    """Of ``16.0 GT/s PCIe``."""
    words = ((read_text(folder / file) if folder else None) or "").split()
    return _GENERATIONS.get(words[0].removesuffix(".0")) if words else None


def _lanes(folder: Path | None, file: str) -> int | None:
    text = ((read_text(folder / file) if folder else None) or "").strip()
    return int(text) if text.isdigit() and text != "0" else None
