"""Puts a pool's tiers together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from pagein.kv.cache.device import USUAL_TOKENS, DeviceTier
from pagein.kv.cache.fingerprint import fingerprint_of, weights_digest
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.reading import read_geometry
from pagein.kv.disk.store import BlockStore
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.cold import Cold
from pagein.kv.tiers.host import HostTier
from pagein.kv.tiers.lanes import lane_of, page_lock
from pagein.kv.tiers.roots import Roots
from pagein.kv.tiers.settings import KvSettings
from pagein.memory.probes.host import read_machine

_GROWTH = 8
"""What a pool on a CPU may grow to, in its first budget: addresses are reserved, memory is not."""
_WEIGHTS = "weights.json"
"""Beside the blocks: digests of weight files, remembered while those stand untouched."""


@dataclass(frozen=True, slots=True)
class Built:
    """The parts."""

    books: Books
    below: Below
    roots: Roots
    own_store: BlockStore | None
    """The store that this pool opened, and closes."""

    def close(self) -> None:
        """Give everything back."""
        if self.own_store is not None:
            self.own_store.close()
        if self.below.host is not None:
            self.below.host.close()
        self.books.device.close()


def build(
    model: Any,
    memory: int,
    most: int | None,
    device: str | torch.device | None,
    host: int | None,
    disk: Path | str | BlockStore | None,
    disk_cap: int,
    settings: KvSettings,
    weights: str | None,
    adapters: Mapping[str, str],
    clock: Callable[[], float],
) -> Built:
    """Make all tiers; raises what a store raises that cannot be opened."""
    geometry = model if isinstance(model, Geometry) else read_geometry(model)
    where = torch.device(device or getattr(model, "device", None) or "cpu")
    total = psutil.virtual_memory().total
    on_cpu = where.type == "cpu"
    limit = most if most is not None else min(memory * _GROWTH, max(total, memory)) if on_cpu else memory
    usual = settings.max_tokens or USUAL_TOKENS
    books = Books(DeviceTier(geometry, memory, where, most=limit, usual=usual), lane_of(where), settings, clock)
    store = disk if isinstance(disk, BlockStore) or disk is None else BlockStore.open(Path(disk), cap=disk_cap)
    if weights is None:
        process = f"of this process {secrets.token_hex(16)}"
        weights = process if store is None else weights_digest(model, store.folder / _WEIGHTS)
    roots = Roots(model, fingerprint_of(model, geometry, settings, weights), adapters)
    cold = None
    if store is not None:
        cold = Cold(store, geometry, roots, lambda tokens: tokens / books.pace.prefill.value, books.count_written)
    tier = None if on_cpu else _host(where, host, settings, total)
    return Built(books, Below(books, tier, cold), roots, None if store is disk else store)


def _host(where: torch.device, host: int | None, settings: KvSettings, total: int) -> HostTier | None:
    """Host memory beside an accelerator, page-locked up to the share that the settings allow."""
    pinned = int(total * settings.pinned_share)
    available = read_machine().pools["ram"].available if host is None else None
    cap = host if host is not None else int((available or 0) * settings.pinned_share)
    return HostTier(cap, page_lock(where), pinned) if cap else None
