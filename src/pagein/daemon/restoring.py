"""Brings what was saved of a prompt back into a slot before the engine computes it, where that pays.

Belongs to the event loop's thread; the disk is asked in others. Whatever goes wrong is a miss, and the engine computes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from pagein.daemon.kept import Counters, Live, with_slot
from pagein.daemon.saving import LEAST_TOKENS, SAVE_BOUND, Saving
from pagein.errors import PageinError
from pagein.gateway.ports import Prepared
from pagein.gateway.splice import without
from pagein.history import TurnOf
from pagein.kv.snapshots.answers import Entry, Fetched, Match, Miss, MissKind
from pagein.kv.snapshots.header import digest_tokens, pack_tokens
from pagein.kv.snapshots.llama_file import read_slot_file
from pagein.kv.snapshots.store import Store
from pagein.sessions.slot_table import Route
from pagein.units import format_bytes, format_duration

RESTORE_BOUND = 30.0
"""Longest restore."""
DIGEST_WAIT = 2.0
"""Longest that a request waits for the digest of its model's weights, which mostly was made while they loaded."""


class Restoring:
    """Chooses the slot of each request, and has it hold as much of the prompt as was saved."""

    def __init__(self, store: Store, tenant: str, saving: Saving, counters: Callable[[str], Counters]) -> None:
        self._store, self._tenant, self._saving, self._counters = store, tenant, saving, counters

    async def prepare(self, live: Live, path: str, body: bytes, turn: TurnOf | None) -> Prepared:
        """Do what `Keeper.prepare` says for a worker with slots; never raises, never takes the answer."""
        try:
            fields = json.loads(body)
            if not isinstance(fields, Mapping):
                return Prepared(body)
            if "id_slot" in fields:  # which slot it gets is not the client's to say
                body = without(body, ("id_slot",))
            async with live.turn:
                return await self._prepare(live, path, body, fields, turn)
        except PageinError as error:
            return self._missed(live.model, body, error.message, "failed")
        except (OSError, ValueError) as error:
            return self._missed(live.model, body, str(error), "failed")

    async def _prepare(
        self, live: Live, path: str, body: bytes, fields: Mapping[str, object], turn: TurnOf | None
    ) -> Prepared:
        wanted = fields.get("cache_prompt") is not False
        tokens = await live.slots.tokens_of(path, fields) if wanted else None
        if tokens is None:
            await self._let_go(live)
            why = "its prompt is no list of tokens" if wanted else "it says `cache_prompt: false`"
            return self._missed(live.model, body, why, "media" if wanted else "unwanted")
        busy = {slot.id for slot in await live.slots.look() if slot.busy}
        # the engine may still be at a request whose client left: it will take this one behind it
        route = live.table.route(tokens, self._tenant, busy | live.in_flight) or live.table.route(
            tokens, self._tenant, live.in_flight
        )
        if route is None:
            return self._missed(live.model, body, "every slot is in use", "busy")
        live.in_flight.add(route.slot)
        try:
            if route.displaced is not None or route.common < route.likely:
                await self._saving.slot(live, route.slot, SAVE_BOUND)
                route = live.table.route_to(route.slot, tokens, self._tenant)  # the save told what is really there
            if route.foreign:
                await live.slots.erase(route.slot)
            prepared = await self._restore(live, route, tokens, body)
        except BaseException:
            live.in_flight.discard(route.slot)
            raise
        sure = 0 if live.whole_only else max(route.common, prepared.restored)
        live.table.begins(route.slot, tokens, self._tenant, turn, sure)
        return replace(prepared, worker=live.number)

    async def _let_go(self, live: Live) -> None:
        """A request comes whose slot the engine chooses: save what it may take, and rely on nothing that was there."""
        for slot in range(live.facts.slots):
            if slot not in live.in_flight:
                await self._saving.slot(live, slot, SAVE_BOUND)
                held = live.table.held(slot)
                if held is not None and held.tenant != self._tenant:
                    await live.slots.erase(slot)
                live.table.emptied(slot)

    async def _restore(self, live: Live, route: Route, tokens: list[int], body: bytes) -> Prepared:
        model, pace = live.model, live.pace
        if live.facts.slots > 1:
            body = with_slot(body, route.slot)
        if not live.identified.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(live.identified.wait(), DIGEST_WAIT)
        if route.common < LEAST_TOKENS:
            await self._saving.written(model, SAVE_BOUND)  # what its last worker saved just before it left
        if live.fingerprint is None:
            return self._missed(model, body, "the weights are not digested yet", "unready", route.slot, tokens)
        at_least = max(LEAST_TOKENS, route.common + 1)
        match = await asyncio.to_thread(self._store.longest_match, live.fingerprint, tokens, at_least=at_least)
        if not isinstance(match, Match):
            if route.common >= LEAST_TOKENS:
                there = f"{route.common} of {len(tokens)} tokens are still there"
                return Prepared(body, route.slot, tokens, reason=there)
            return self._missed(model, body, match.reason, match.kind.value, route.slot, tokens)
        size = match.snapshot.header.payload_bytes
        verdict = pace.can_restore(match.common_tokens - route.common, size)
        pace.decided(verdict)
        if not verdict.pays:
            return self._missed(model, body, verdict.reason, "slower", route.slot, tokens)
        began = time.monotonic()
        lost = await self._bring_back(live, route.slot, match.snapshot)
        if lost is not None:
            return self._missed(model, body, lost.reason, lost.kind, route.slot, tokens)
        seconds = time.monotonic() - began
        pace.restored(size, seconds)
        told = f"restored {match.common_tokens} of {len(tokens)} tokens ({format_bytes(size)})"
        reason = f"{told} in {format_duration(seconds)}"
        return Prepared(body, route.slot, tokens, match.common_tokens, seconds, reason)

    async def _bring_back(self, live: Live, slot: int, entry: Entry) -> Miss | None:
        """Let the engine read a snapshot that was verified; returns why it did not."""
        file = live.slots.new_file()
        try:
            fetched = await asyncio.to_thread(self._store.fetch, entry, file)
            if not isinstance(fetched, Fetched):
                return fetched
            saved = (await asyncio.to_thread(read_slot_file, file)).tokens
            if digest_tokens(pack_tokens(saved)) != entry.header.tokens_digest:
                return Miss(MissKind.DAMAGED, "the snapshot holds other tokens than it says")
            live.table.emptied(slot)  # what it had is lost, whatever comes of this
            await live.slots.restore(slot, file, saved, RESTORE_BOUND)
            named = entry.header.conversation
            turn = TurnOf(named, time.monotonic()) if named is not None else None
            live.table.restored(slot, saved, self._tenant, turn)
        except PageinError as error:
            return Miss(MissKind.FAILED, error.message)
        finally:
            file.unlink(missing_ok=True)
        return None

    def _missed(
        self, model: str, body: bytes, why: str, kind: str, slot: int | None = None, tokens: list[int] | None = None
    ) -> Prepared:
        misses = self._counters(model).misses
        misses[kind] = misses.get(kind, 0) + 1
        return Prepared(body, slot, tokens, miss=why, kind=kind)
