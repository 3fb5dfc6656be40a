"""One model's conversations over three tiers: what library users and the engine hold."""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from pagein.errors import KvBusy
from pagein.kv.cache.device import DeviceTier
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.pictures import pictures_of
from pagein.kv.cache.safe import too_long, warn_of_settings
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.disk.checking import Checked
from pagein.kv.disk.store import BlockStore
from pagein.kv.tiers.answers import Flushed, Reuse
from pagein.kv.tiers.attaching import Attacher
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.building import Built, build
from pagein.kv.tiers.conversation import Conversation
from pagein.kv.tiers.forgetting import Forgetting
from pagein.kv.tiers.leaving import Leaving
from pagein.kv.tiers.mover import Mover
from pagein.kv.tiers.parking import Parking
from pagein.kv.tiers.planning import Planner
from pagein.kv.tiers.promises import Promises
from pagein.kv.tiers.registry import Registry
from pagein.kv.tiers.report import KvReport, make_report
from pagein.kv.tiers.resizing import resize
from pagein.kv.tiers.settings import KvSettings
from pagein.kv.tiers.stretching import Stretching
from pagein.kv.tiers.turns import Turns
from pagein.kv.tiers.writing import Writer
from pagein.units import parse_bytes


class KvPool:
    """A budget of KV blocks on a device, and what backs it: host memory (beside an accelerator) and a folder on disk.

    All methods may be called from any thread; a cache itself belongs to one thread at a time (its turn's). Nothing is
    taken from a conversation while it is in a turn, and no promotion reaches a block that was not verified.

    ``model`` is a transformers model (or a `Geometry`; then a disk needs ``weights``). ``memory``, ``host`` and
    ``disk_cap`` are bytes or texts as ``"256MiB"``; ``most`` is what `resize` may grow to. ``host=None``: with an
    accelerator the pinned share of the machine's memory, on a CPU none. ``disk``: a folder, or a store that is open
    (several pools of a process share one); None: no disk tier. ``adapters`` maps names of adapters to digests of their
    weights; ``weights`` is the digest of the model's weights where the caller knows it. ``clock`` gives seconds.
    """

    def __init__(
        self,
        model: Any,
        *,
        memory: int | str = "256MiB",
        most: int | str | None = None,
        device: str | torch.device | None = None,
        host: int | str | None = None,
        disk: Path | str | BlockStore | None = None,
        disk_cap: int | str = "10GiB",
        settings: KvSettings | None = None,
        weights: str | None = None,
        adapters: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        built: Built = build(
            model,
            parse_bytes(memory),
            None if most is None else parse_bytes(most),
            device,
            None if host is None else parse_bytes(host),
            disk,
            parse_bytes(disk_cap),
            settings or KvSettings(),
            weights,
            adapters or {},
            clock,
        )
        self.geometry: Geometry = built.books.geometry
        self.pictures = pictures_of(model)
        if not isinstance(model, Geometry):
            warn_of_settings(model, self.geometry)
        self.settings = built.books.settings
        device, below = built.books.device, built.below.exists
        sentence = too_long(self.geometry, device.memory, self.settings.max_tokens, below=below)
        if sentence is not None:
            warnings.warn(sentence, stacklevel=2)
        self._wire(built)

    def _wire(self, built: Built) -> None:
        """Let the parts know each other."""
        self._books: Books = built.books
        self._below: Below = built.below
        self._mover = Mover()
        self._writer = Writer(self._books, self._below, self._mover)
        self._leaving = Leaving(self._books, self._below, self._mover, self._writer)
        attacher = Attacher(self._books, self._below, self._mover)
        self._stretching = Stretching(self._books, self._below, attacher)
        self._promises = Promises(self._books, self._stretching)
        planner = Planner(self._books, self._below)
        self._turns = Turns(
            self._books, self._below, built.roots, self._writer, self._promises, planner, attacher, self._stretching
        )
        self._parking = Parking(self._books, self._below)
        self._registry = Registry(self._books, self._parking)
        self._forgetting = Forgetting(self._books, self._below, self._mover, self._registry)
        self._closed = False
        self._books.device.on_full = self._leaving.make_room
        # A garbage collector may call it in any thread: in the mover's, or in one that has what a move waits for.
        self._finalizer = weakref.finalize(self, self._mover.finish, built.close)

    @property
    def device(self) -> DeviceTier:
        """The blocks of the device."""
        return self._books.device

    # Conversations
    def open(self, name: str | None = None, tenant: str = "", *, expected: int = 0) -> TieredCache:
        """Return the cache of a conversation: the one that is there, idle, or else a new one.

        While a turn of ``name`` runs, a second `open` of it gives a fork without a name: it shares what is sealed, and
        both answer as if alone. ``expected`` are the tokens that it may reach, where somebody knows.
        """
        with self._books.lock:
            self._check_open()
            known = self._registry.named(name, tenant) if name is not None else None
            if known is not None and known.kept is not None and not known.active:
                return known.kept
            taken = known is not None and known.cache_ref() is not None
            return TieredCache(pool=self, name=None if taken else name, tenant=tenant, expected=expected)

    def join(self, cache: TieredCache) -> None:
        """Keep a new cache's conversation; `TieredCache` calls it. KvBusy where its name is another cache's."""
        self._check_open()
        self._registry.join(cache)

    def begin(self, cache: TieredCache, tokens: Sequence[int], *, overlap: bool | None = None) -> Reuse:
        """Begin a turn with the whole prompt; `TieredCache.begin` calls it.

        The cache then holds the KV of the first ``Reuse.tokens`` of them, from wherever the longest such prefix is:
        never of all of them. Where the prompt is more than the device holds, layers lie in the tier below and come up
        one by one: slower, exact, and told. Raises `KvFull` where even that is more than there is, or others in a turn
        have the room. With
        ``overlap`` (default: the settings') the turn may compute while later layers still come up; `KvLost` out of a
        pass then means: begin again.
        """
        one = self._conversation(cache)
        return self._turns.begin(one, cache, tokens, overlap=self.settings.overlap if overlap is None else overlap)

    def end(self, cache: TieredCache, tokens: Sequence[int]) -> None:
        """End a turn; `TieredCache.end` calls it. Seals what the rows stand for, and lets it be copied down."""
        self._settle(cache)

    def abandon(self, cache: TieredCache) -> None:
        """End a turn that was called off, at any point: what is known to be right stays, all else is free at once."""
        self._settle(cache)

    def close_cache(self, cache: TieredCache) -> None:
        """A cache was closed, its blocks are free; `TieredCache.close` calls it.

        What was written to the disk stays there for the next `open` of its name; `forget` removes that, too.
        """
        self._registry.closed(cache)

    def forget(self, name: str, tenant: str = "") -> None:
        """Remove a conversation from every tier, the bytes on the disk that no other one shares included."""
        self._forgetting.forget(name, tenant)

    def thin_out(self, idle: float | None = None) -> int:
        """Remove from every tier what was idle for longer than so many seconds, or all that is; returns how many."""
        return self._forgetting.thin_out(idle)

    def drop_idle(self) -> None:
        """Free what idle conversations have on the device at once: what was not written down is computed anew."""
        with self._books.lock:
            idle = [one for one in self._books.conversations.values() if one.idle and not one.pinned]
        for one in idle:
            if one.writing is not None:
                one.writing.call_off()
                one.writing.wait()
            self._leaving.drop(one)

    def pin(self, name: str, tenant: str = "", *, pinned: bool = True) -> None:
        """Keep a conversation on the device and the disk, or no longer. Nothing where it is not known."""
        with self._books.lock:
            one = self._registry.named(name, tenant)
            if one is not None:
                one.pinned = pinned
        if self._below.cold is not None:
            if pinned:
                self._below.cold.store.pin(name, tenant)
            else:
                self._below.cold.store.unpin(name, tenant)

    def prefetch(self, name: str, tenant: str = "") -> None:
        """Start to bring an idle conversation up in the background, as far as blocks are free: its turn comes soon."""
        with self._books.lock:
            one = self._registry.named(name, tenant)
            if one is None or not one.idle or one.moving or not one.tokens:
                return
            one.moving = True
        self._mover.add(self._turns.coming_back(one), f"prefetch of {name}", urgent=True, on_end=self._moved(one))

    # Admission
    def could(self, tokens: int) -> bool:
        """Tell whether a turn that ends with so many tokens can be admitted now, and always finish."""
        self._registry.sweep()
        return self._promises.could(tokens)

    def could_ever(self, tokens: int) -> bool:
        """Tell whether the device has room for a turn of so many tokens if it is alone, layer by layer at worst."""
        return self._promises.could_ever(tokens)

    def reserve(self, cache: TieredCache, tokens: int) -> None:
        """Promise blocks to a turn so that it can reach so many tokens; raises `KvFull` where that cannot be.

        `begin` promises for the prompt; beyond its promise a turn takes blocks as it grows, and gets `KvFull` when none
        can be made free. A promise ends with the turn, with `park`, or with the next `reserve`.
        """
        one = self._conversation(cache)
        if self._promises.make(one, tokens) and one.active:
            self._stretching.stretch(one, cache, tokens)

    def park(self, cache: TieredCache) -> None:
        """Preempt a turn between two passes: its blocks move below and become free; side state stays where it is.

        Raises `KvFull` where they cannot all be kept below; the turn is then as it was.
        """
        self._parking.park(self._conversation(cache), cache)

    def resume(self, cache: TieredCache, tokens: int | None = None) -> None:
        """Bring a parked turn back exactly as it was, with a promise for so many tokens.

        Raises `KvFull` while there is no room (it stays parked), and `KvLost` where the disk lost some of it.
        """
        one = self._conversation(cache)
        if one.parked is not None:
            self._promises.make(one, max(tokens or 0, one.parked.length))
            try:
                self._parking.resume(one, cache)
            except BaseException:
                one.promise = None
                raise

    def prefilled(self, tokens: int, seconds: float) -> None:
        """Note what so many tokens of a prompt took to compute: that is what a promotion from the disk has to beat."""
        with self._books.lock:
            self._books.pace.prefilled(tokens, seconds)

    # The pool itself
    def resize(self, memory: int | str) -> int:
        """Live with other bytes on the device from now on, between two passes; returns what is in use then.

        Idle conversations leave first, then blocks of long idle ones. Raises `KvFull`, and lives with what it had,
        where turns that run need more: park some, then ask again.
        """
        return resize(self._books, self._leaving, parse_bytes(memory))

    def trim(self) -> None:
        """Demote idle conversations ahead of need, as the settings say, in the background; each turn's end does so."""
        self._mover.add(_once(self._leaving.trim), "trim")

    def flush(self, deadline: float | None = None) -> Flushed:
        """Write what the disk does not have yet, for at most ``deadline`` seconds: before sleep, unload, exit."""
        begun, before = time.monotonic(), self._books.counters.written.blocks
        with self._books.lock:
            idle = [
                (one, one.kept)
                for one in self._books.conversations.values()
                if one.idle and not one.moving and one.kept is not None and one.kept.batch.length
            ]
        for one, cache in idle:
            if one.writing is None or one.writing.ended:
                self._writer.write_behind(one, cache)
        self._mover.drain(deadline)
        written = self._books.counters.written.blocks - before
        return Flushed(written, self._mover.waiting, time.monotonic() - begun)

    def check_disk(self, after: str | None = None) -> dict[str, Any]:
        """Read a part of the blocks on the disk through (`disk.checking`), JSON-ready; nothing without a disk."""
        return Checked(0, 0, (), 0, None).told() if self._below.cold is None else self._below.cold.check(after)

    def report(self) -> KvReport:
        """Return what lies where, what was reused, how fast copies were, and whether any block is leaked."""
        self._registry.sweep()
        return make_report(self._books, self._below, self._mover.waiting)

    def close(self, deadline: float | None = None) -> None:
        """Flush, for at most so many seconds, end the thread, free everything; caches are empty then. Idempotent."""
        if self._closed:
            return
        self.flush(deadline)
        self._registry.sweep()
        self._closed = True
        self._mover.close()
        # No turn can run any more; what is in one is lost.
        for one in list(self._books.conversations.values()):
            cache = one.kept or one.cache_ref()
            if cache is not None:
                cache.close()
        self._finalizer()

    def _conversation(self, cache: TieredCache) -> Conversation:
        self._check_open()
        return self._registry.of(cache)

    def _settle(self, cache: TieredCache) -> None:
        one = self._conversation(cache)
        if not one.active:  # never begun: nobody knows what its rows stand for
            if self.geometry.has_encoder:
                cache.reset()
            return
        if one.parked is not None:  # its blocks go with its place below
            cache.reset()
        self._parking.drop(one)
        self._turns.end(one, cache, self._registry.take_over)
        if self._leaving.due:
            self.trim()

    def _moved(self, one: Conversation) -> Callable[[], None]:
        def moved() -> None:
            with self._books.lock:
                one.moving = False
                self._books.news.notify_all()

        return moved

    def _check_open(self) -> None:
        if self._closed:
            raise KvBusy("the pool of KV blocks is closed")


def _once(act: Callable[[], None]) -> Any:
    act()
    yield
