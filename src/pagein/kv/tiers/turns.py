"""Turns of conversations: what a prompt reuses when one begins, what is kept when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from pagein.errors import CacheMismatch, KvBusy, KvFull
from pagein.kv.blocks.keys import chain, common_length
from pagein.kv.cache.beside import Beside
from pagein.kv.cache.fingerprint import differing
from pagein.kv.cache.side import SideUnknown
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.disk.answers import Ref
from pagein.kv.snapshots.answers import Miss, MissKind
from pagein.kv.tiers.answers import Reuse, Source, Why
from pagein.kv.tiers.attaching import Attacher
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.coming import Arrival, is_damage
from pagein.kv.tiers.conversation import Conversation, Links
from pagein.kv.tiers.planning import OnDevice, Plan, Planner, PlanStale
from pagein.kv.tiers.promises import Promises
from pagein.kv.tiers.roots import Roots
from pagein.kv.tiers.stretching import Stretching
from pagein.kv.tiers.writing import Writer

_MOST_TRIES = 64
"""Damaged blocks of one prompt after which it is computed anew: each try drops one from the disk."""


class _Told(NamedTuple):
    """Why no more is reused: a label, and words."""

    kind: Why = Why.TOKENS
    words: str = ""


class Turns:
    """Begins and ends turns of one pool."""

    def __init__(
        self,
        books: Books,
        below: Below,
        roots: Roots,
        writer: Writer,
        promises: Promises,
        planner: Planner,
        attacher: Attacher,
        stretching: Stretching,
    ) -> None:
        self._books, self._below, self._roots = books, below, roots
        self._writer, self._promises, self._stretching = writer, promises, stretching
        self._planner, self._attacher = planner, attacher
        self._coming: dict[int, Arrival] = {}

    def begin(self, one: Conversation, cache: TieredCache, tokens: Sequence[int], *, overlap: bool) -> Reuse:
        """Begin a turn: the cache holds the longest prefix that lies anywhere, never all of the prompt."""
        prompt, books = tuple(tokens), self._books
        with books.lock:
            while one.moving:
                books.news.wait()
            if cache.batch.closed:
                raise CacheMismatch("a turn of a cache", "been closed", f"{len(prompt)} tokens")
            if one.active:
                raise KvBusy(f"conversation {one.name or one.id} is in a turn: end it first, or open the name again")
            too_large = self._promises.make(one, len(prompt))
            one.active = True
            self._writer.goes_on(one)
        coming, size = (
            Beside(books.device, "the state of layers without K and V"),
            books.geometry.side_bytes(len(prompt)),
        )
        try:
            coming.hold(size)  # what comes up is there before what was there is gone
            reuse = self._reuse(one, cache, prompt, overlap=overlap, too_large=too_large)
            with books.lock:
                coming.free()
                cache.batch.side.hold(size)
            cache.batch.hold_gathers(len(prompt))
            if too_large:
                self._stretching.stretch(one, cache, len(prompt))
        except BaseException:
            coming.free()
            self._call_off(one, cache)
            if cache.batch.stretch is not None:
                cache.reset()
            with books.lock:
                one.active, one.promise = False, None
            raise
        with books.lock:
            one.kept, cache.batch.idle = None, False
            cache.batch.overflow = partial(self._stretching.overflow, one)
            one.prompt, one.base = prompt, reuse.tokens
            counters = books.counters
            counters.turns += 1
            counters.prompt_tokens += len(prompt)
            counters.reused[reuse.source] += reuse.tokens
            counters.hits[reuse.source] += 1
        return reuse

    def end(self, one: Conversation, cache: TieredCache, sealed: Callable[[Conversation], None]) -> None:
        """End a turn, or one that was abandoned: the cache holds what is known to be right.

        ``sealed`` is called once the conversation's tokens are known, before anything of it is written.
        """
        books = self._books
        self._call_off(one, cache)
        longest = books.settings.max_tokens
        if longest is not None and len(cache.tokens) > longest:
            cache.reset()
        stretched = cache.batch.stretch is not None
        with books.lock:
            nodes = self._writer.seal(one, cache)
            one.active, one.promise, one.kept, cache.batch.idle = False, None, cache, True
            one.moving, cache.batch.overflow = stretched, None
            books.touch(one)
            self._below.touch(nodes)
        try:
            sealed(one)
            if stretched:
                self._stretching.leave(one, cache)
        finally:
            if stretched:
                with books.lock:
                    one.moving = False
                    books.news.notify_all()
        if books.settings.write_behind:
            self._writer.write_behind(one, cache)

    def _call_off(self, one: Conversation, cache: TieredCache) -> None:
        """Let no more of a promotion come; what is not whole then is nothing."""
        arrival = self._coming.pop(one.id, None)
        if arrival is not None:
            arrival.call_off()
            cache.landed = None
            if not arrival.whole:
                cache.reset()

    def coming_back(self, one: Conversation) -> Iterator[None]:
        """Bring an idle conversation up as it was, where blocks are free, for its next turn. The mover's steps."""
        books, cache, limit = self._books, one.kept, len(one.tokens)
        if cache is None or cache.batch.length >= limit:
            return
        with books.lock:
            free = all(
                want <= have for want, have in zip(books.amounts(books.blocks_for(limit)), books.free(), strict=True)
            )
        plan, _ = self._best(one, one.links, one.tokens, limit, cache.batch.length)
        yield
        if free and plan is not None and plan.length == limit:
            self._attacher.attach(one, cache, one.links, plan, overlap=False, expected=limit)

    def _reuse(
        self, one: Conversation, cache: TieredCache, prompt: tuple[int, ...], *, overlap: bool, too_large: bool
    ) -> Reuse:
        root, fields = self._roots.of(one.tenant)
        why = _Told()
        if one.root and one.root != root:
            why = _Told(Why.SETTINGS, "computed with other " + ", ".join(differing(one.fields, fields)))
            cache.reset()
        one.root, one.fields = root, fields
        if self._books.geometry.turns_otherwise(len(prompt)):
            cache.reset()
            words = f"{len(prompt)} tokens are turned by other angles than fewer are"
            return Reuse(0, Source.NONE, words, len(prompt), kind=Why.SETTINGS)
        links = chain(root, prompt)
        limit = len(prompt) - 1
        for _ in range(_MOST_TRIES):
            live = self._live(cache, prompt, limit)
            plan, told = self._best(one, links, prompt, limit, live)
            if plan is None:
                return self._stay(one, cache, prompt, live, [why, told])
            try:
                if too_large:
                    arrival = self._stretching.attach(one, cache, links, plan, len(prompt))
                else:
                    expected = max(len(prompt), cache.batch.expected)
                    arrival = self._attacher.attach(one, cache, links, plan, overlap=overlap, expected=expected)
                return self._attached(one, plan, arrival, prompt, why)
            except KvFull:
                if not cache.batch.length:
                    raise
                cache.reset()  # its own blocks are in the way of the longer prefix
            except PlanStale:
                continue
            except SideUnknown as error:  # other layers wrote it
                return self._stay(one, cache, prompt, live, [_Told(Why.SETTINGS, str(error))])
            except Exception as error:
                if not is_damage(error):
                    raise
                self._books.counters.damaged += 1
                why = _Told(Why.DAMAGED, str(error))
        return self._stay(one, cache, prompt, 0, [why])

    def _live(self, cache: TieredCache, prompt: tuple[int, ...], limit: int) -> int:
        """Tokens of the prompt that the cache itself can be taken back to."""
        common = min(common_length(tuple(cache.tokens), prompt), limit)
        return common if common and cache.can_hold(common) else 0

    def _best(
        self, one: Conversation, links: Links, prompt: tuple[int, ...], limit: int, live: int
    ) -> tuple[Plan | None, _Told]:
        """Return the longest prefix that is longer than the cache's own, and pays; or why there is none."""
        books = self._books
        if live >= limit:
            return None, _Told()
        with books.lock:
            near = self._planner.in_memory(links, one.root, limit)
        least = max(near.length, live)
        far = self._planner.on_disk(links, one.root, prompt[:limit], least + 1)
        told = _Told(Why.EMPTY)
        if isinstance(far, Plan):
            verdict = books.pace.can_restore(far.length - least, far.disk_bytes)
            books.pace.decided(verdict)
            if verdict.pays or not books.settings.worth or not far.disk_bytes:
                return far, _Told()
            books.counters.skipped += 1
            told = _Told(Why.SLOWER, verdict.reason)
        elif isinstance(far, Miss):
            kind = Why.EMPTY if far.kind is MissKind.EMPTY else Why.TOKENS
            told = _Told(kind, f"the disk has no more: {far.reason}")
        return (near if near.length > live else None), told

    def _stay(
        self, one: Conversation, cache: TieredCache, prompt: tuple[int, ...], live: int, told: list[_Told]
    ) -> Reuse:
        """Reuse what the cache has itself, maybe nothing."""
        known, words = len(cache.tokens), "; ".join(part.words for part in told if part.words)
        if live:
            cache.crop_to(live)
            kind = _first([*told, _Told(words="it begins otherwise")]) if live < len(prompt) - 1 else None
            more = f"; {words}" if words and kind is not None else ""
            return Reuse(
                live, Source.LIVE, f"{live} of {len(prompt)} tokens are as before{more}", len(prompt), kind=kind
            )
        common = common_length(tuple(cache.tokens), prompt)
        cache.reset()
        here = _Told(Why.EMPTY if not known else Why.TOKENS, "nothing that is known begins like this prompt")
        if common:
            why = f"the first {common} of {known} tokens are as before, but the cache cannot be taken back to them"
            here = _Told(Why.TOKENS, why)
        other = _Told(Why.SETTINGS, self._roots.changed(one, self._below.cold))
        every = [here, other, *told]
        reason = "; ".join(part.words for part in every if part.words)
        return Reuse(0, Source.NONE, reason, len(prompt), kind=_first(every))

    def _attached(self, one: Conversation, plan: Plan, arrival: Arrival, prompt: tuple[int, ...], why: _Told) -> Reuse:
        """Say what came, and count it."""
        if arrival.move is not None:
            self._coming[one.id] = arrival
        elif arrival.disk_bytes:
            self._books.pace.restored(arrival.disk_bytes, arrival.seconds)
        words = {
            Source.SHARED: "lie on the device already",
            Source.HOST: "lie on the device or in host memory",
            Source.DISK: "lie in memory or on the disk",
        }[plan.source]
        more = f"; {why.words}" if why.words else ""
        reason = f"{plan.length} of {len(prompt)} tokens {words}{more}"
        size = sum(
            one.origin.bytes if isinstance(one.origin, Ref) else self._below.forms[group].bytes(one.rows)
            for group, steps in enumerate(plan.steps)
            for one in steps
            if not isinstance(one.origin, OnDevice)
        )
        kind = _first([why]) if plan.length < len(prompt) - 1 else None
        return Reuse(plan.length, plan.source, reason, len(prompt), size, arrival.seconds, kind)


_ORDER = (Why.DAMAGED, Why.SLOWER, Why.SETTINGS, Why.TOKENS, Why.EMPTY)
"""What is said first where several are true."""


def _first(told: Sequence[_Told]) -> Why:
    """The label of several reasons; one without words says nothing."""
    kinds = {part.kind for part in told if part.words}
    return next((kind for kind in _ORDER if kind in kinds), Why.TOKENS)
