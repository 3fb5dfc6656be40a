"""A real store of snapshots behind the operator's interface, without a keeper and its workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pagein.daemon.blocks import BlockStores
from pagein.daemon.kept import Counters
from pagein.daemon.saved import Saved
from tests.kv.snapshots.build import Clock, open_store

RETAIN = 30 * 86400.0


def saved_in(folder: Path, *models: str, **counters: Counters) -> tuple[Saved, Any, Clock]:
    """Return the interface, its store and the store's clock."""
    clock = Clock()
    store = open_store(folder, clock)

    async def nothing() -> None:
        """There are no workers, and nothing is being written."""

    async def pools() -> dict[str, Any]:
        return {"p": {"active": 1}}

    blocks = BlockStores(folder / "b", store, lambda model: counters[model], lambda *_: False, asyncio.ensure_future)
    blocks.reports = pools  # type: ignore[method-assign]
    keeper: Any = SimpleNamespace(
        store=store, counters=counters, saving=SimpleNamespace(recheck=nothing, written=nothing), blocks=blocks
    )
    roster: Any = SimpleNamespace(
        models=dict.fromkeys(models), settings=SimpleNamespace(state=SimpleNamespace(retain=RETAIN))
    )
    return Saved(keeper, roster), store, clock
