"""What `pagein doctor` is told of a worker beside its pool's report: scattered blocks, and torch's own figures."""

from __future__ import annotations

from typing import Any

import torch

from pagein.kv.blocks.ground import Ground
from pagein.kv.cache.device import DeviceTier


def diagnose(device: DeviceTier) -> dict[str, object]:
    """Return ``fragmentation`` (0 to 1, None where no block is free) and ``allocator`` (None on a CPU), JSON-ready."""
    with device.lock:
        free = sum(ground.free for ground in device.grounds)
        together = sum(longest_run(ground) for ground in device.grounds)
    return {
        "fragmentation": None if not free else 1 - together / free,
        "allocator": _allocator(device.device),
    }


def longest_run(ground: Ground) -> int:
    """Return how many free blocks of a ground stand together at the most."""
    longest = here = 0
    for block in range(ground.blocks):
        here = 0 if ground.count(block) else here + 1
        longest = max(longest, here)
    return longest


def _allocator(device: torch.device) -> dict[str, Any] | None:
    """Bytes as torch's caching allocator counts them; ``fragmentation`` is what it reserved and nobody has."""
    if device.type != "cuda":
        return None
    stats = torch.cuda.memory_stats(device)
    reserved, allocated = stats["reserved_bytes.all.current"], stats["allocated_bytes.all.current"]
    return {
        "allocated": allocated,
        "reserved": reserved,
        "peak": stats["allocated_bytes.all.peak"],
        "active": stats["active_bytes.all.current"],
        "fragmentation": None if not reserved else stats["inactive_split_bytes.all.current"] / reserved,
    }
