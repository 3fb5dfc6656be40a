"""Turns of conversations: what a prompt reuses when one begins, what is kept when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pagein.errors import CacheMismatch, KvBusy, KvFull
from pagein.kv.answers import Miss
from pagein.kv.blocks.keys import chain, common_length
from pagein.kv.cache.answers import Reuse, Source
from pagein.kv.cache.attaching import Attacher
from pagein.kv.cache.below import Below
from pagein.kv.cache.books import Books
from pagein.kv.cache.coming import Arrival, is_damage
from pagein.kv.cache.conversation import Conversation, Links
from pagein.kv.cache.fingerprint import differing
from pagein.kv.cache.planning import OnDevice, Plan, Planner, PlanStale
from pagein.kv.cache.promises import Promises
from pagein.kv.cache.roots import Roots
from pagein.kv.cache.side import SideUnknown
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.cache.writing import Writer
from pagein.kv.disk.answers import Ref

_MOST_TRIES = 64
"""Damaged blocks of one prompt after which it is computed anew: each try drops one from the disk."""


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
    ) -> None:
        self._books, self._below, self._roots = books, below, roots
        self._writer, self._promises = writer, promises
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
            self._promises.make(one, len(prompt))
            one.active = True
            self._writer.goes_on(one)
        try:
            reuse = self._reuse(one, cache, prompt, overlap=overlap)
        except BaseException:
            with books.lock:
                one.active, one.promise = False, None
            raise
        with books.lock:
            one.kept, cache.batch.idle = None, False
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
        arrival = self._coming.pop(one.id, None)
        if arrival is not None:
            arrival.call_off()
            cache.landed = None
            if not arrival.whole:
                cache.reset()
        longest = books.settings.max_tokens
        if longest is not None and len(cache.tokens) > longest:
            cache.reset()
        with books.lock:
            nodes = self._writer.seal(one, cache)
            one.active, one.promise, one.kept, cache.batch.idle = False, None, cache, True
            books.touch(one)
            self._below.touch(nodes)
        sealed(one)
        if books.settings.write_behind:
            self._writer.write_behind(one, cache)

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

    def _reuse(self, one: Conversation, cache: TieredCache, prompt: tuple[int, ...], *, overlap: bool) -> Reuse:
        root, fields = self._roots.of(one.tenant)
        why = ""
        if one.root and one.root != root:
            why = "computed with other " + ", ".join(differing(one.fields, fields))
            cache.reset()
        one.root, one.fields = root, fields
        if self._books.geometry.turns_otherwise(len(prompt)):
            cache.reset()
            words = f"{len(prompt)} tokens are turned by other angles than fewer are"
            return Reuse(0, Source.NONE, words, len(prompt))
        links = chain(root, prompt)
        limit = len(prompt) - 1
        for _ in range(_MOST_TRIES):
            live = self._live(cache, prompt, limit)
            plan, told = self._best(one, links, prompt, limit, live)
            if plan is None:
                return self._stay(one, cache, prompt, live, "; ".join(part for part in (why, told) if part))
            try:
                return self._attach(one, cache, links, plan, prompt, overlap=overlap, why=why)
            except KvFull:
                if not cache.batch.length:
                    raise
                cache.reset()  # its own blocks are in the way of the longer prefix
            except PlanStale:
                continue
            except SideUnknown as error:  # other layers wrote it
                return self._stay(one, cache, prompt, live, str(error))
            except Exception as error:
                if not is_damage(error):
                    raise
                self._books.counters.damaged += 1
                why = str(error)
        return self._stay(one, cache, prompt, 0, why)

    def _live(self, cache: TieredCache, prompt: tuple[int, ...], limit: int) -> int:
        """Tokens of the prompt that the cache itself can be taken back to."""
        common = min(common_length(tuple(cache.tokens), prompt), limit)
        return common if common and cache.can_hold(common) else 0

    def _best(
        self, one: Conversation, links: Links, prompt: tuple[int, ...], limit: int, live: int
    ) -> tuple[Plan | None, str]:
        """Return the longest prefix that is longer than the cache's own, and pays; or why there is none."""
        books = self._books
        if live >= limit:
            return None, ""
        with books.lock:
            near = self._planner.in_memory(links, one.root, limit)
        least = max(near.length, live)
        far = self._planner.on_disk(links, one.root, prompt[:limit], least + 1)
        told = ""
        if isinstance(far, Plan):
            verdict = books.pace.can_restore(far.length - least, far.disk_bytes)
            books.pace.decided(verdict)
            if verdict.pays or not books.settings.worth or not far.disk_bytes:
                return far, ""
            books.counters.skipped += 1
            told = verdict.reason
        elif isinstance(far, Miss):
            told = f"the disk has no more: {far.reason}"
        return (near if near.length > live else None), told

    def _stay(self, one: Conversation, cache: TieredCache, prompt: tuple[int, ...], live: int, told: str) -> Reuse:
        """Reuse what the cache has itself, maybe nothing."""
        known = len(cache.tokens)
        if live:
            cache.crop_to(live)
            more = f"; {told}" if told and live < len(prompt) - 1 else ""
            return Reuse(live, Source.LIVE, f"{live} of {len(prompt)} tokens are as before{more}", len(prompt))
        common = common_length(tuple(cache.tokens), prompt)
        cache.reset()
        words = "nothing that is known begins like this prompt"
        if common:
            words = f"the first {common} of {known} tokens are as before, but the cache cannot be taken back to them"
        other = self._roots.changed(one, self._below.cold)
        parts = [part for part in (words, other, told) if part]
        return Reuse(0, Source.NONE, "; ".join(parts), len(prompt))

    def _attach(
        self,
        one: Conversation,
        cache: TieredCache,
        links: Links,
        plan: Plan,
        prompt: tuple[int, ...],
        *,
        overlap: bool,
        why: str,
    ) -> Reuse:
        books, expected = self._books, max(len(prompt), cache.batch.expected)
        arrival = self._attacher.attach(one, cache, links, plan, overlap=overlap, expected=expected)
        if arrival.move is not None:
            self._coming[one.id] = arrival
        elif arrival.disk_bytes:
            books.pace.restored(arrival.disk_bytes, arrival.seconds)
        words = {
            Source.SHARED: "lie on the device already",
            Source.HOST: "lie on the device or in host memory",
            Source.DISK: "lie in memory or on the disk",
        }[plan.source]
        more = f"; {why}" if why else ""
        reason = f"{plan.length} of {len(prompt)} tokens {words}{more}"
        size = sum(
            one.origin.bytes if isinstance(one.origin, Ref) else self._below.forms[group].bytes(one.rows)
            for group, steps in enumerate(plan.steps)
            for one in steps
            if not isinstance(one.origin, OnDevice)
        )
        return Reuse(plan.length, plan.source, reason, len(prompt), size, arrival.seconds)
