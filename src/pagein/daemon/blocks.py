"""The block stores of workers that keep KV caches by themselves: where each lies, what it may take, what must leave it.

A store has one user at a time. While its worker lives, that is the worker, and it is asked (`block_worker`); else the
daemon opens the store itself. What a worker has locked by then waits for it. Belongs to the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any

from pagein.catalog.model import ModelEntry
from pagein.daemon.block_worker import ask
from pagein.daemon.idle_store import Busy, Left, bytes_of, check, forget_in, thin_out
from pagein.daemon.kept import Counters
from pagein.errors import ModelNotFound, PageinError
from pagein.gateway.ports import Prepared
from pagein.gateway.snapshot_ports import BlocksView
from pagein.history import Gone, TurnOf
from pagein.kv.snapshots.reuse import Counted
from pagein.kv.snapshots.store import Store
from pagein.protocol import Endpoint

_log = logging.getLogger("pagein.state")

ENGINES = frozenset({"transformers"})
"""Engines whose workers keep KV caches by themselves."""
SNAPSHOT_ENGINE = "llama_cpp"
FORGET_WAIT = 5.0
"""Longest that a deletion waits for a worker, whose pass may take longer; it goes on after that."""
ASK_WAIT = 600.0
"""Longest that a worker may take to let go: it does so between two passes."""
LOOK_WAIT = 2.0
KINDS = frozenset({"empty", "tokens", "settings", "slower", "unwanted", "damaged", "room", "encoder"})
"""Words for misses that are counted as such; a label must not be whatever a worker says."""


class BlockStores:
    """All of them, one for each configured model of `ENGINES`."""

    def __init__(
        self,
        root: Path,
        snapshots: Store,
        counters: Callable[[str], Counters],
        was_deleted: Callable[[str, TurnOf | None], bool],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        """``snapshots`` shares the cap that it was opened with from now on; ``root`` is made when it is needed."""
        self._root, self._snapshots = root, snapshots
        self._counters, self._was_deleted, self._spawn = counters, was_deleted, spawn
        self._total = snapshots.usage().cap
        self._live: dict[str, Endpoint] = {}
        self._late: dict[str, set[Gone]] = {}
        """What is to be forgotten in stores that were locked."""
        self._share = 0

    # ── where, and how much ─────────────────────────────────────────────────────────────────────

    def divide(self, entries: Mapping[str, ModelEntry]) -> None:
        """Share `state.disk`: half for snapshots where a model makes any, the rest in equal parts for the stores.

        Without a model that makes snapshots they keep what they take, up to that half.
        """
        engines = [entry.engine for entry in entries.values()]
        stores = sum(engine in ENGINES for engine in engines)
        half = self._total // 2
        keeps = half if SNAPSHOT_ENGINE in engines else min(self._snapshots.usage().bytes, half)
        self._snapshots.limit(keeps if stores else self._total)
        self._share = (self._total - keeps) // stores if stores else 0

    def place(self, name: str, entries: Mapping[str, ModelEntry]) -> tuple[Path, int] | None:
        """Where the worker of a model keeps blocks, and how many bytes; None where its engine keeps none."""
        if entries[name].engine not in ENGINES:
            return None
        self.divide(entries)
        return self._root / name, self._share

    def sweep(self, names: Collection[str]) -> None:
        """Remove the stores of models that are not configured any more."""
        for folder in self._folders():
            if folder.name not in names:
                shutil.rmtree(folder, ignore_errors=True)
                (self._root / f".{folder.name}-weights.json").unlink(missing_ok=True)  # a digest that is remembered

    # ── a worker's life ─────────────────────────────────────────────────────────────────────────

    def begin(self, name: str, endpoint: Endpoint) -> None:
        """Its worker is ready: what was to be forgotten meanwhile is told to it."""
        self._live[name] = endpoint
        self._catch_up(name)

    def gone(self, name: str) -> None:
        """Its worker has ended."""
        self._live.pop(name, None)
        self._catch_up(name)

    def _catch_up(self, name: str) -> None:
        if late := self._late.pop(name, None):
            self._spawn(self._forget(name, late))

    def serves(self, name: str) -> bool:
        """Whether a worker of this model lives."""
        return name in self._live

    # ── requests ────────────────────────────────────────────────────────────────────────────────

    def account(self, model: str, tenant: str, prepared: Prepared, counted: Counted | None) -> None:
        """Count what a worker said that it reused; what was deleted while it answered is forgotten once more."""
        if counted is not None:
            counters = self._counters(model)
            counters.computed += counted.computed
            counters.cached += counted.cached
            counters.restored += counted.restored or 0
            counters.restores += bool(counted.restored)
            if counted.miss is not None:
                kind = counted.miss.partition(":")[0]
                kind = kind if kind in KINDS else "other"
                counters.misses[kind] = counters.misses.get(kind, 0) + 1
        if prepared.turn is not None and self._was_deleted(tenant, prepared.turn):
            self._spawn(self._forget(model, {Gone(tenant, prepared.turn.conversation)}))

    # ── letting go ──────────────────────────────────────────────────────────────────────────────

    async def forget(self, gone: Iterable[Gone], beside: asyncio.Task[None]) -> None:
        """Remove conversations from every store, while their snapshots are; waits for both.

        What a worker still computes of them goes at the end of its turn.
        """
        told = set(gone)
        tasks = [self._spawn(self._forget(name, told)) for name in self._names()]
        if tasks:
            await asyncio.wait(tasks, timeout=FORGET_WAIT)
        await beside

    async def _forget(self, name: str, gone: set[Gone]) -> None:
        endpoint = self._live.get(name)
        try:
            if endpoint is not None:
                await ask(endpoint, {"forget": [list(one) for one in gone]}, ASK_WAIT)
            else:
                await asyncio.to_thread(forget_in, self._root / name, gone)
        except (Busy, PageinError) as error:  # its worker begins or ends just now
            if self._live.get(name) is not endpoint:
                await self._forget(name, gone)
                return
            self._late.setdefault(name, set()).update(gone)
            _log.info("%s: what was deleted goes when its worker can be asked: %s", name, error)

    async def keep_only(self, known: Collection[Gone]) -> None:
        """Forget the conversations that are not ``known``: a crash came between the two deletions."""
        for name in self._idle():
            try:
                left = await asyncio.to_thread(forget_in, self._root / name, None, known)
            except (Busy, PageinError) as error:
                _log.info("%s: its blocks were not looked through: %s", name, error)
            else:
                if left.conversations:
                    _log.info("%s: the blocks of %d conversations that are no more left", name, left.conversations)

    async def thin_out(self, idle: float | None) -> Left:
        """Remove what was not used for so many seconds, or all."""
        wish: dict[str, object] = {"all": True} if idle is None else {"idle": idle}
        total = Left()
        for name in self._names():
            try:
                if (endpoint := self._live.get(name)) is not None:
                    told = await ask(endpoint, wish, ASK_WAIT)
                    total += Left(int(told.get("conversations", 0)), int(told.get("bytes", 0)))
                else:
                    total += await asyncio.to_thread(thin_out, self._root / name, self._share, idle)
            except (Busy, PageinError, ValueError, TypeError) as error:
                _log.warning("%s: its blocks were not thinned out: %s", name, error)
        return total

    async def check(self, name: str, after: str | None) -> dict[str, Any]:
        """Read a part of a store through (`protocol.KV_PATH`), by its worker where one lives.

        Raises ModelNotFound where there is no such store, Busy, PageinError and OSError where it cannot be read now,
        and ValueError for a place that is none.
        """
        if name not in self._names():
            raise ModelNotFound(name, self._names())
        if (endpoint := self._live.get(name)) is not None:
            return await ask(endpoint, {"check": after or ""}, ASK_WAIT)
        return await asyncio.to_thread(check, self._root / name, after)

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    async def views(self) -> list[BlocksView]:
        """What each store takes."""
        sizes = await asyncio.to_thread(lambda: {name: bytes_of(self._root / name) for name in self._names()})
        return [BlocksView(name, size, self._share, name in self._live) for name, size in sorted(sizes.items())]

    async def reports(self) -> dict[str, dict[str, Any]]:
        """The pool of each worker that lives, as it reports it; ``error`` where it does not answer."""

        async def one(endpoint: Endpoint) -> dict[str, Any]:
            try:
                return await ask(endpoint, None, LOOK_WAIT)
            except PageinError as error:
                return {"error": error.message}

        live = dict(self._live)
        return dict(zip(live, await asyncio.gather(*map(one, live.values())), strict=True))

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in self._root.iterdir() if folder.is_dir()]
        except FileNotFoundError:
            return []

    def _names(self) -> list[str]:
        return sorted({*self._live, *(folder.name for folder in self._folders())})

    def _idle(self) -> list[str]:
        return [folder.name for folder in self._folders() if folder.name not in self._live]
