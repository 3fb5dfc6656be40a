"""The saved conversations for the operator: shows them, reads them through, lets them go; never blocks the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from pagein.daemon.idle_store import Busy
from pagein.daemon.keeper import Keeper
from pagein.daemon.roster import Roster
from pagein.errors import ModelNotFound, PageinError, SnapshotNotFound
from pagein.gateway.snapshot_ports import (
    BlocksView,
    Fault,
    Removed,
    ReuseView,
    SavedView,
    SnapshotView,
    UsageView,
    Verified,
)
from pagein.kv.snapshots.answers import Entry, MissKind
from pagein.kv.snapshots.value import ASSUMED_TOKENS_PER_SECOND, Candidate, victims

DIGITS = 12
"""Of a digest, as shown."""


class Saved:
    """Implements `pagein.gateway.snapshot_ports.Snapshots`."""

    def __init__(self, keeper: Keeper, roster: Roster) -> None:
        self._keeper, self._roster = keeper, roster

    async def view(self) -> SavedView:
        """All of them, the last used first."""
        usage, snapshots = await asyncio.to_thread(lambda: (self._usage(), self._snapshots()))
        return SavedView(usage, snapshots, self.reuse(), await self.blocks())

    async def usage(self) -> UsageView:
        """What they take, and may take."""
        return await asyncio.to_thread(self._usage)

    async def blocks(self) -> list[BlocksView]:
        """What workers that keep KV caches by themselves have on the disk."""
        return await self._keeper.blocks.views()

    def reuse(self) -> list[ReuseView]:
        """What requests reused since the start, of the models that are configured now."""
        found = []
        for model, counted in self._keeper.counters.items():
            if model in self._roster.models:
                cached = max(counted.cached - counted.restored, 0)
                tokens = (counted.restored, cached, counted.computed)
                found.append(ReuseView(model, *tokens, counted.restores, counted.saves, dict(counted.misses)))
        return found

    async def remove(self, snapshots: Sequence[str] | None) -> Removed:
        """Remove these, or all."""
        store = self._keeper.store
        await self._keeper.saving.written()
        here = [entry.id for entry in await asyncio.to_thread(store.entries)]
        for snapshot in snapshots or ():
            if snapshot not in here:
                raise SnapshotNotFound(snapshot)
        left = await asyncio.to_thread(store.remove, here if snapshots is None else snapshots)
        await self._keeper.saving.recheck()
        if snapshots is not None:
            return _removed(left)
        return _removed(left, (await self._keeper.blocks.thin_out(None)).bytes)

    async def verify(self, snapshot: str | None) -> Verified:
        """Read one through, or all; a client that leaves ends it after the one being read."""
        entries = await asyncio.to_thread(self._keeper.store.entries)
        wanted = [entry for entry in entries if snapshot in (None, entry.id)]
        if snapshot is not None and not wanted:
            raise SnapshotNotFound(snapshot)
        checked, faults = [], []
        for entry in wanted:
            miss = await asyncio.to_thread(self._keeper.store.verify, entry.id)
            if miss is not None and miss.kind is MissKind.GONE:
                continue  # it left meanwhile, as they do
            checked.append(entry)
            if miss is not None:
                faults.append(Fault(entry.id, miss.kind.value, miss.reason))
        return Verified(len(checked), sum(entry.bytes for entry in checked), faults)

    async def verify_blocks(self, model: str, after: str | None) -> Verified:
        """Read a part of a model's KV blocks through; what cannot be read now is a fault that says why."""
        try:
            told = await self._keeper.blocks.check(model, after)
            faults = [Fault(f"{model}/{block}", MissKind.DAMAGED.value, reason) for block, reason in told["faults"]]
            return Verified(told["checked"], told["bytes"], faults, told["left"], told["next"])
        except ModelNotFound:
            raise
        except (Busy, PageinError, OSError) as error:
            return Verified(0, 0, [Fault(model, "failed", str(error))])

    async def gc(self, idle: float | None) -> Removed:
        """Sweep, and remove what is idle for longer or over the cap."""
        longest = self._roster.settings.state.retain if idle is None else idle
        left = await asyncio.to_thread(lambda: self._keeper.store.gc(max_idle=longest))
        await self._keeper.saving.recheck()
        return _removed(left, (await self._keeper.blocks.thin_out(longest)).bytes)

    async def pools(self) -> dict[str, dict[str, Any]]:
        """The pools of workers that keep KV caches by themselves."""
        return await self._keeper.blocks.reports()

    def _usage(self) -> UsageView:
        used = self._keeper.store.usage()
        return UsageView(used.snapshots, used.bytes, used.reserved, used.damaged_bytes, used.cap, used.floor)

    def _snapshots(self) -> list[SnapshotView]:
        store = self._keeper.store
        idle = [(entry, store.idle_seconds(entry.id)) for entry in store.entries()]
        here = [(entry, seconds) for entry, seconds in idle if seconds is not None]
        candidates = [_candidate(entry, seconds) for entry, seconds in here]
        order = victims(candidates, sum(one.bytes for one in candidates)) or []
        places = {snapshot: place for place, snapshot in enumerate(order, 1)}
        return [_view(entry, seconds, places[entry.id]) for entry, seconds in here]


def _candidate(entry: Entry, idle: float) -> Candidate:
    return Candidate(entry.id, entry.bytes, entry.header.tokens, idle, entry.header.seconds_saved)


def _view(entry: Entry, idle: float, place: int) -> SnapshotView:
    header, made = entry.header, entry.header.fingerprint
    model = header.facts.get("model")
    assumed = header.tokens / ASSUMED_TOKENS_PER_SECOND
    return SnapshotView(
        id=entry.id,
        model=model if isinstance(model, str) else None,
        fingerprint=made.digest[:DIGITS],
        weights=made.weights[:DIGITS],
        engine=made.engine,
        build=made.build,
        kv_type=f"{made.kv_type_k}/{made.kv_type_v}",
        context=made.context,
        tokens=header.tokens,
        bytes=entry.bytes,
        created=header.created,
        idle_seconds=idle,
        worth_seconds=header.seconds_saved if header.seconds_saved is not None else assumed,
        leaves=place,
    )


def _removed(left: Sequence[Entry], blocks: int = 0) -> Removed:
    return Removed(len(left), sum(entry.bytes for entry in left), blocks)
