"""Keeps what conversations computed: saves it before it is lost, brings it back before it is needed (row G4).

For workers whose engine can save a slot (`protocol.StateFacts`). The store verifies what is brought back, the engine's
own counters prove that it was used, and whatever goes wrong is a miss: the engine then computes the prompt as ever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import Collection, Coroutine, Mapping
from pathlib import Path
from typing import Any

from pagein.catalog.attention import kept_of
from pagein.catalog.model import ModelEntry
from pagein.config.schema import Settings
from pagein.daemon.block_worker import headers_of, keeps_blocks
from pagein.daemon.blocks import BlockStores
from pagein.daemon.kept import Counters, Live, fingerprint_of, is_tenant_of
from pagein.daemon.restoring import Restoring
from pagein.daemon.saving import SAVE_BOUND, Saving
from pagein.errors import ConfigError
from pagein.gateway.ports import Prepared
from pagein.history import Gone, TurnOf
from pagein.kv.snapshots.answers import Entry
from pagein.kv.snapshots.paces import Paces
from pagein.kv.snapshots.reuse import Counted
from pagein.kv.snapshots.store import Store
from pagein.kv.snapshots.weights import Cancelled, WeightDigests
from pagein.protocol import PATHS, Capability, Ready
from pagein.sessions.llama_slots import WAY, LlamaSlots
from pagein.sessions.slot_table import SlotTable
from pagein.sessions.tenant import tenant_of

_log = logging.getLogger("pagein.state")

SAVE_AFTER = 1.0
"""Seconds after an answer until its conversation is saved, if nothing else came meanwhile."""
GC_EVERY = 6 * 3600.0
"""Seconds between two looks at what has not been used for too long."""
KEPT_ENGINE = "llama_cpp"
KEPT_PATHS = {PATHS[Capability.CHAT], PATHS[Capability.COMPLETION]}


class Keeper:
    """The saved conversations of all models; belongs to the event loop's thread, the disk is asked in others."""

    def __init__(self, store: Store, digests: WeightDigests, tenant: str, folder: Path, strangers: bool) -> None:
        """Use `open`."""
        self._strangers = strangers
        self.store = store
        self._digests, self._tenant = digests, tenant
        self._staging, self.slots = folder / "incoming", folder / "slots"
        self._live: dict[str, Live] = {}
        self._paces = Paces(folder / "paces.json")
        self.counters: dict[str, Counters] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self.saving = Saving(store, self._staging, self._paces, self._live, self._counters, self._spawn)
        self._restoring = Restoring(store, tenant, self.saving, self._counters)
        self.blocks = BlockStores(folder / "blocks", store, self._counters, self.saving.was_deleted, self._spawn)
        self._closed = False

    @classmethod
    def open(cls, folder: Path, settings: Settings) -> Keeper | None:
        """Open or make the folder; None where the configuration says so. Raises ConfigError where it cannot be used.

        What an earlier daemon left half-way is removed, but for the folders of workers that it left alive.
        """
        state = settings.state
        if not state.enabled:
            return None
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for name in ("incoming", "slots"):
                (folder / name).mkdir(mode=0o700, exist_ok=True)
            for leftover in (folder / "incoming").iterdir():
                leftover.unlink(missing_ok=True)
            cap = int(state.disk * shutil.disk_usage(folder).free) if isinstance(state.disk, float) else state.disk
            store = Store.open(folder / "snapshots", cap=cap)
            tenant = tenant_of(settings.server.api_key, state.salt)
            strangers = not is_tenant_of(folder, tenant)
        except OSError as error:
            raise ConfigError(f"saved conversations cannot be kept in {folder}: {error}") from error
        keeper = cls(store, WeightDigests(folder / "weights.json"), tenant, folder, strangers)
        keeper.store.gc(max_idle=state.retain)
        return keeper

    def sweep(self, adopted: Collection[str], entries: Mapping[str, ModelEntry]) -> None:
        """Remove the slot folders of workers that are gone, and the blocks of models that are not configured any more.

        ``adopted`` are the folders of workers that were taken over, ``entries`` the models.
        """
        self.blocks.sweep(entries)
        self.blocks.divide(entries)
        for left in self.slots.iterdir():
            if str(left) not in adopted:
                shutil.rmtree(left, ignore_errors=True)

    # ── a worker's life ─────────────────────────────────────────────────────────────────────────

    def begin(self, entry: ModelEntry, ready: Ready) -> None:
        """A worker is ready; its weights are digested in the background, and until then nothing is restored."""
        facts, info = ready.state, entry.info
        if keeps_blocks(ready):
            self.blocks.begin(entry.name, ready.endpoint)
        if facts is None or facts.way != WAY or info is None or self._closed:
            return
        attention = kept_of(info, entry.options)
        if not attention.is_kept:
            return
        slots = LlamaSlots(entry.name, ready.endpoint, facts)
        pace = self._paces.of(f"{entry.peak_key} {facts.build}")
        table = SlotTable(facts.slots)
        if self._strangers:
            table.are_foreign()
        live = self._live[entry.name] = Live(entry.name, slots, facts, table, not attention.can_be_cut, pace)
        self._spawn(self._identify(entry, live))

    def expect(self, entry: ModelEntry) -> None:
        """A load begins: digest its weights beside it, which also reads them into the cache."""
        if entry.info is not None and entry.engine == KEPT_ENGINE and not self._closed:
            files = entry.info.files or (entry.info.path,)
            if not self._digests.known(files):
                self._spawn(self._digest(files))

    async def _digest(self, files: tuple[Path, ...]) -> None:
        with contextlib.suppress(OSError, Cancelled):  # `_identify` says what is wrong
            await asyncio.to_thread(self._digests.digest, files, lambda: self._closed)

    async def _identify(self, entry: ModelEntry, live: Live) -> None:
        assert entry.info is not None
        files = entry.info.files or (entry.info.path,)
        try:
            digest = await asyncio.to_thread(self._digests.digest, files, lambda: live.over)
        except (OSError, Cancelled) as error:
            _log.info("%s: its conversations are not kept: %s", entry.name, str(error) or "it left")
        else:
            live.fingerprint = fingerprint_of(entry, live.facts, digest, self._tenant)
        live.identified.set()

    async def end(self, name: str) -> None:
        """The worker leaves by the scheduler's wish: save what it holds, within `SAVE_BOUND`; never raises."""
        live = self._live.pop(name, None)
        if live is None:
            return
        live.over = True
        try:
            async with asyncio.timeout(SAVE_BOUND):
                await self._save_all(live)
        except TimeoutError:
            _log.warning("%s: saving its conversations took longer than %s; they are recomputed", name, SAVE_BOUND)
        except Exception:  # a model must be able to leave whatever happens here
            _log.exception("saving the conversations of %s failed", name)
        await self._leave(live)

    async def _leave(self, live: Live) -> None:
        await live.slots.close()
        await asyncio.to_thread(self._paces.write, self._paces.measured())
        await asyncio.to_thread(shutil.rmtree, live.facts.folder, True)

    def forget(self, name: str) -> None:
        """The worker is gone without a word; what was saved before stays."""
        self.blocks.gone(name)
        live = self._live.pop(name, None)
        if live is not None:
            live.over = True
            self._spawn(self._leave(live))

    async def close(self) -> None:
        """Finish what is being written; the workers have ended."""
        self._closed = True
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=SAVE_BOUND * 2)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.to_thread(self._paces.write, self._paces.measured())

    async def look_after(self, retain: float) -> None:
        """Remove what was not used for longer than ``retain`` seconds, again and again."""
        while True:
            await asyncio.sleep(GC_EVERY)
            await asyncio.to_thread(self.store.gc, max_idle=retain)
            await self.blocks.thin_out(retain)
            await self.saving.recheck()

    # ── before a request ────────────────────────────────────────────────────────────────────────

    async def prepare(self, model: str, path: str, body: bytes, turn: TurnOf | None = None) -> Prepared:
        """Bring the longest saved beginning of a prompt back, if that pays; never raises, never takes the answer.

        What is saved of a conversation's ``turn`` is removed with that conversation.
        """
        live = self._live.get(model)
        if self.blocks.serves(model):
            return Prepared(body, headers=headers_of(self._tenant, turn), turn=turn)
        if live is None or path not in KEPT_PATHS:
            return Prepared(body)
        return await self._restoring.prepare(live, path, body, turn)

    # ── after a request ─────────────────────────────────────────────────────────────────────────

    def account(self, model: str, prepared: Prepared, counted: Counted | None, computed: bool = False) -> str | None:
        """Compare with the engine's own counters; returns the miss where a restore was not used (rule 7).

        ``computed``: the answer began, so all of the prompt is in its slot, even where no counters came.
        """
        if prepared.headers:
            self.blocks.account(model, self._tenant, prepared, counted)
            return None
        counters, live, unused = self._counters(model), self._live.get(model), None
        if live is not None and counted is not None and counted.prompt_seconds:
            live.pace.prefilled(counted.computed, counted.prompt_seconds)
        if live is not None and live.number != prepared.worker:
            live = None  # of a worker that is gone: its successor's slots are not touched
        if counted is not None:
            counters.computed += counted.computed
            counters.cached += counted.cached
        if prepared.restored and counted is not None:
            partly = live is not None and live.whole_only and counted.cached > 0  # it goes on from a checkpoint
            if counted.proves(prepared.restored) or partly:
                counters.restores += 1
                counters.restored += min(prepared.restored, counted.cached)
            else:
                unused = f"the engine used {counted.cached} of {prepared.restored} restored tokens"
                counters.misses["unused"] = counters.misses.get("unused", 0) + 1
        if live is not None and prepared.slot is not None:
            live.in_flight.discard(prepared.slot)
            if computed or counted is not None:
                live.table.computed(prepared.slot)
            self._spawn(self._save_later(live, prepared.slot))
        return unused

    async def _save_later(self, live: Live, slot: int) -> None:
        """Off the request's path, once the slot has been quiet for a moment."""
        held = live.table.held(slot)
        await asyncio.sleep(SAVE_AFTER)
        if live.over or slot in live.in_flight or held is None or live.table.held(slot) is not held:
            return
        async with live.turn:
            await self.saving.slot(live, slot, SAVE_BOUND)

    async def _save_all(self, live: Live) -> None:
        async with live.turn:
            for slot in range(live.facts.slots):
                await self.saving.slot(live, slot, SAVE_BOUND)

    def forget_conversations(self, gone: Collection[Gone], erase: bool) -> asyncio.Task[None]:
        """Something of these conversations was deleted: nothing that was computed of them stays (`Saving.forget`)."""
        return self._spawn(self.blocks.forget(gone, self.saving.forget(gone, erase)))

    # ── questions ───────────────────────────────────────────────────────────────────────────────

    def entries(self) -> list[Entry]:
        """What is saved, the last used first."""
        return self.store.entries()

    def _counters(self, model: str) -> Counters:
        return self.counters.setdefault(model, Counters())

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            _log.error("keeping a conversation failed", exc_info=fault)
