"""Puts what a slot holds on the disk, and lets go of what must not be there: deleted conversations.

Belongs to the event loop's thread; the disk is asked in others. Whatever goes wrong is only not kept.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagein.daemon.kept import Counters, Live
from pagein.errors import PageinError
from pagein.history import Gone, TurnOf
from pagein.kv.snapshots.answers import Kept, Match, Skipped
from pagein.kv.snapshots.header import unpack_tokens
from pagein.kv.snapshots.offer import Offer
from pagein.kv.snapshots.paces import Paces
from pagein.kv.snapshots.store import Store

_log = logging.getLogger("pagein.state")

SAVE_BOUND = 2.0
"""Seconds that saving may hold up a model that leaves; what takes longer is left to the history."""
LEAST_TOKENS = 32
"""Tokens below which nothing is saved or restored: a call takes longer than computing them."""
MOST_FORGOTTEN = 10_000
"""Deleted conversations that are remembered, for turns of them that have not ended yet."""


@dataclass(frozen=True, slots=True)
class _Deleted:
    at: float
    """Monotonic seconds."""
    erase: bool
    """Live slots are to forget it, too."""


class Saving:
    """What is saved of live slots, and what is not any more."""

    def __init__(
        self,
        store: Store,
        staging: Path,
        paces: Paces,
        lives: Mapping[str, Live],
        counters: Callable[[str], Counters],
        spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._store, self._staging, self._paces, self._lives = store, staging, paces, lives
        self._counters, self._spawn = counters, spawn
        self._writing: dict[str, set[asyncio.Task[None]]] = {}
        self._forgotten: dict[Gone, _Deleted] = {}

    async def slot(self, live: Live, slot: int, bound: float) -> None:
        """Let the engine write a slot, then keep the file in the background; needs the worker's turn.

        A slot whose conversation was deleted is let go instead.
        """
        held = live.table.held(slot)
        if held is None:
            return
        if (deleted := self._deleted(held.tenant, held.turn)) is not None:
            await self._let_go(live, slot, deleted.erase)
            return
        if held.saved or held.left or live.fingerprint is None or held.tokens < LEAST_TOKENS:
            return
        tokens = min(held.tokens, live.facts.context or held.tokens)  # a longer prompt was refused, and is not there
        pace, size = live.pace, live.bytes_for(tokens)
        verdict = pace.can_save(tokens, size, bound if pace.saving.measured else None)  # the first save is tried
        if not verdict.pays:
            _log.info("%s: a conversation is left to its history: %s", live.model, verdict.reason)
            return
        try:
            saved = await live.slots.save(slot, bound)
        except PageinError as error:
            _log.info("%s: a conversation was not saved: %s", live.model, error.message)
            return
        if saved is None:
            return
        live.learn_size(len(saved.tokens), saved.bytes)
        live.table.saved(slot, saved.tokens)
        staged = self._staging / saved.path.name
        try:
            saved.path.replace(staged)  # the worker's folder goes with the worker
        except OSError as error:
            _log.warning("%s: a saved conversation was lost: %s", live.model, error)
            live.table.left(slot)
            return
        pace.saved(saved.bytes, saved.seconds)  # the engine's part: the rest holds nobody up
        offer = Offer(
            live.fingerprint,
            saved.tokens,
            saved.bytes,
            conversation=held.turn.conversation if held.turn is not None else None,
            whole_only=live.whole_only,
            seconds_saved=max(0.0, verdict.seconds_saved),
            facts={"model": live.model},
        )
        self._write(live, slot, offer, staged, held.turn)

    def _write(self, live: Live, slot: int, offer: Offer, staged: Path, turn: TurnOf | None) -> None:
        writing = self._writing.setdefault(live.model, set())
        live.writing[slot] += 1
        task = self._spawn(self._keep(live, slot, offer, staged, turn))
        writing.add(task)
        task.add_done_callback(writing.discard)

    async def _keep(self, live: Live, slot: int, offer: Offer, staged: Path, turn: TurnOf | None) -> None:
        """Put a file that the engine wrote into the store, and see what left for it."""
        try:
            kept = await self._put(offer, staged, turn)
        finally:
            await asyncio.to_thread(staged.unlink, True)
            live.writing[slot] -= 1
        if isinstance(kept, Kept):
            self._counters(live.model).saves += 1
            await asyncio.to_thread(self._paces.write, self._paces.measured())
        else:
            _log.debug("%s: a conversation was not kept: %s", live.model, kept.reason)
        if not isinstance(kept, Kept) or kept.left:
            await self.recheck()

    async def _put(self, offer: Offer, staged: Path, turn: TurnOf | None) -> Kept | Skipped:
        """Put it there, unless its conversation is deleted by the time that it is done."""
        tenant = offer.fingerprint.tenant
        if self._deleted(tenant, turn) is None:
            kept = await asyncio.to_thread(self._store.put, offer, staged)
            if turn is None or self._deleted(tenant, turn) is None:
                return kept
            await asyncio.to_thread(self._store.remove_conversation, turn.conversation, tenant)
        return Skipped("its conversation was deleted")

    async def written(self, model: str | None = None, timeout: float | None = None) -> None:
        """Wait for what is being written, of one model or of all."""
        tasks = [task for name, writing in self._writing.items() for task in writing if model in (None, name)]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)

    # ── letting go ──────────────────────────────────────────────────────────────────────────────

    def was_deleted(self, tenant: str, turn: TurnOf | None) -> bool:
        """Whether a conversation, or something of it, was deleted since a turn of it began."""
        return self._deleted(tenant, turn) is not None

    def _deleted(self, tenant: str, turn: TurnOf | None) -> _Deleted | None:
        """How a conversation, or something of it, was deleted since a turn of it began; None where it was not."""
        if turn is None:
            return None
        deleted = self._forgotten.get(Gone(tenant, turn.conversation))
        return deleted if deleted is not None and turn.since <= deleted.at else None

    def forget(self, gone: Collection[Gone], erase: bool) -> asyncio.Task[None]:
        """Something of these conversations was deleted: of their turns until now nothing is saved any more.

        Their snapshots go, and the task ends once nothing is left of them but in turns under way, which keep their
        slots until their end. Live slots are erased where that is asked for; else (a turn broke) they may serve when it
        is sent again. A conversation of which only a part was deleted is saved again with its next turn.
        """
        for one in gone:
            self._forgotten.pop(one, None)
            self._forgotten[one] = _Deleted(time.monotonic(), erase)
        while len(self._forgotten) > MOST_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        return self._spawn(self._forget(gone, erase))

    async def _forget(self, gone: Collection[Gone], erase: bool) -> None:
        await self.written()
        await asyncio.to_thread(self._remove, gone, erase)
        for live in list(self._lives.values()):
            async with live.turn:
                for slot in range(live.facts.slots):
                    held = live.table.held(slot)
                    if slot in live.in_flight:
                        continue
                    if held is not None:
                        if (deleted := self._deleted(held.tenant, held.turn)) is not None:
                            await self._let_go(live, slot, deleted.erase)
                    elif erase:  # what is there is not known, so it may be of these
                        await self._let_go(live, slot, erase)
        await self.recheck()

    def _remove(self, gone: Iterable[Gone], damaged: bool) -> None:
        if damaged:
            self._store.remove_damaged()
        for tenant, conversation in gone:
            self._store.remove_conversation(conversation, tenant)

    async def _let_go(self, live: Live, slot: int, erase: bool) -> None:
        if not erase:
            live.table.left(slot)
            return
        live.table.emptied(slot)
        try:
            await live.slots.erase(slot)
        except PageinError as error:
            _log.info("%s: what was deleted is still in slot %d, and is not saved: %s", live.model, slot, error.message)

    async def keep_only(self, known: Collection[Gone]) -> None:
        """Remove the snapshots of conversations that are not ``known``: a crash came between the two deletions."""
        unknown = [
            entry.id
            for entry in await asyncio.to_thread(self._store.entries)
            if entry.header.conversation is not None
            and Gone(entry.header.fingerprint.tenant, entry.header.conversation) not in known
        ]
        if unknown:
            left = await asyncio.to_thread(self._store.remove, unknown)
            _log.info("%d snapshots of conversations that are no more were removed", len(left))

    async def recheck(self) -> None:
        """Let no live slot count as saved whose snapshot left the disk: for room, by age, or by hand."""
        for live in list(self._lives.values()):
            for slot in range(live.facts.slots):
                held = live.table.held(slot)
                if held is None or not held.saved or live.writing[slot] or live.fingerprint is None:
                    continue
                asked = [*unpack_tokens(held.packed), 0]  # a state that cannot be cut back serves only what goes on
                found = await asyncio.to_thread(
                    self._store.longest_match, live.fingerprint, asked, at_least=held.tokens
                )
                if not isinstance(found, Match) and live.table.held(slot) is held:
                    live.table.left(slot)
