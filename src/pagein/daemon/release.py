"""Measures that the memory of an ended worker came back, and ends what of it still runs (row G12)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from pagein.daemon.meter import Meter
from pagein.supervisor.child import Child
from pagein.supervisor.limits import Cell

_log = logging.getLogger("pagein.fleet")

PAUSE, PAUSE_MAX = 0.02, 1.0
"""Seconds between two looks; doubles from one to the other."""
RESIDUE = 16 * 1024**2
"""Bytes that the group of an ended worker may still be charged: page tables and slabs that the kernel frees late."""
MOST_MISSING = 0.25
"""Share of what a worker took of a GPU that may be missing afterwards: other programs take and free there as well."""
FORGOTTEN = 60.0
"""Seconds after which what is missing on a GPU, with no process of the worker left, counts as somebody else's."""


class Release:
    """One worker's way out, after its process has ended."""

    def __init__(
        self,
        name: str,
        child: Child | None,
        cell: Cell | None,
        took: dict[str, int],
        beside: dict[str, int | None],
        meter: Meter,
    ) -> None:
        """``took`` is what the worker was measured to take last, ``beside`` what was available then; per pool."""
        self._name, self._child, self._cell, self._took, self._meter = name, child, cell, took, meter
        self._before = beside
        self._since = time.monotonic()

    async def until_free(self, timeout: float) -> dict[str, int]:
        """Wait until all of it is measured to be back, at most ``timeout`` seconds; returns what is not, per pool."""
        deadline = time.monotonic() + timeout
        pause = PAUSE
        while True:
            left = await self.look()
            if not left or time.monotonic() >= deadline:
                break
            await asyncio.sleep(pause)
            pause = min(PAUSE_MAX, pause * 2)
        if left:
            _log.warning("%s left memory behind: %s", self._name, left)
        else:
            await self._forget_cell()
        return left

    async def follow(self, tell: Callable[[dict[str, int]], None]) -> None:
        """Go on after `until_free`, and tell each change, until nothing is left."""
        told: dict[str, int] | None = None
        failed = False
        while told != {}:
            await asyncio.sleep(PAUSE_MAX)
            try:
                left = await self.look()
            except Exception:  # what is charged now would stay so for ever
                if not failed:
                    _log.exception("looking for what %s left behind failed; it goes on", self._name)
                failed = True
                continue
            if left != told:
                tell(left)
                told = left
        await self._forget_cell()

    async def look(self) -> dict[str, int]:
        """End what runs of it, and measure what it holds now."""
        pids = await self._survivors()
        left = {}
        if pids:
            _log.warning("%s left processes %s behind; ending them", self._name, pids)
            if self._child is not None:
                await self._child.kill()
            if self._cell is not None:
                await asyncio.to_thread(self._cell.kill)
            pids = await self._survivors()
            if pids:
                left["ram"] = await self._meter.measure_processes(pids)
        usage = self._cell.usage() if self._cell is not None else None
        if usage is not None and usage > RESIDUE:
            left["ram"] = max(usage, left.get("ram", 0))
        return {pool: count for pool, count in (left | await self._missing(bool(pids))).items() if count > 0}

    async def _survivors(self) -> list[int]:
        pids = set(self._cell.pids()) if self._cell is not None else set()
        if self._child is not None:
            pids |= set(await self._child.pids())
        return sorted(pids)

    async def _missing(self, alive: bool) -> dict[str, int]:
        """What of a GPU did not come back: drivers free late, and processes that nobody sees hold memory there."""
        pools = [pool for pool in self._took if pool != "ram"]
        if not pools or (not alive and time.monotonic() - self._since > FORGOTTEN):
            return {}
        await self._meter.measure_machine()
        missing = {}
        for pool in pools:
            before, now = self._before.get(pool), self._meter.available.get(pool)
            if before is not None and now is not None:
                gap = self._took[pool] - (now - before)
                if gap > self._took[pool] * MOST_MISSING:
                    missing[pool] = min(gap, self._took[pool])
        return missing

    async def _forget_cell(self) -> None:
        if self._cell is not None and not await asyncio.to_thread(self._cell.remove):
            _log.warning("the cgroup of %s cannot be removed yet; the next start looks for it", self._name)


class Leftovers:
    """What ended workers left behind, by model: several of one model may have left something."""

    def __init__(self) -> None:
        self._of: dict[str, dict[Release, dict[str, int]]] = {}

    def note(self, name: str, release: Release, left: dict[str, int]) -> dict[str, int]:
        """Take in what one of them holds now, bytes per pool; returns what all of the model hold together."""
        rows = self._of.setdefault(name, {})
        rows[release] = left
        if not left:
            del rows[release]
        if not rows:
            del self._of[name]
        pools = {pool for row in rows.values() for pool in row}
        return {pool: sum(row.get(pool, 0) for row in rows.values()) for pool in pools}
