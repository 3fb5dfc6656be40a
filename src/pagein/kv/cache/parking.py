"""Preempts a turn between two passes and brings it back exactly: its blocks rest below under keys of its own."""

from __future__ import annotations

from dataclasses import dataclass

from pagein.errors import CacheMismatch, KvBusy, KvFull, KvLost
from pagein.kv.blocks.keys import BLOCK, chain
from pagein.kv.cache.attaching import Attacher
from pagein.kv.cache.below import Below
from pagein.kv.cache.books import Books, Hold
from pagein.kv.cache.coming import is_damage
from pagein.kv.cache.conversation import Conversation, Links
from pagein.kv.cache.known import Node
from pagein.kv.cache.planning import Plan, Planner, PlanStale
from pagein.kv.cache.roots import Roots
from pagein.kv.cache.tiered import TieredCache


@dataclass(slots=True, eq=False)
class Parked:
    """A turn that waits below."""

    root: bytes
    name: str
    """What the disk knows it by."""
    links: Links
    nodes: list[Node]
    length: int
    handles: list[int]
    """Slots of host memory that stay for it."""


class Parking:
    """Nobody knows the tokens of an answer that is being written: positions stand for them, below a root of its own."""

    def __init__(self, books: Books, below: Below, roots: Roots, attacher: Attacher, planner: Planner) -> None:
        self._books, self._below, self._roots = books, below, roots
        self._attacher, self._planner = attacher, planner
        self._made = 0

    def park(self, one: Conversation, cache: TieredCache) -> None:
        """Move a turn's blocks below. Raises KvFull, with the turn as it was, where they cannot all be kept there.

        Compression is lossy, and a turn that is preempted must lose nothing: with it this is refused.
        """
        books, row, length = self._books, cache.batch.rows[0], cache.batch.length
        if one.parked is not None or cache.batch.recording or not cache.batch.agreed:
            raise KvBusy(f"conversation {one.name or one.id} cannot be parked: it is parked already, or within a pass")
        if len(cache.batch.rows) != 1:
            raise CacheMismatch("parking a turn (rows)", 1, len(cache.batch.rows))
        what = f"parking a turn of {length} tokens"
        size = books.bytes_of([len(part.blocks) for part in row.chains])
        if not self._below.exists or books.settings.lossy:
            why = "KV compression is on" if self._below.exists else "there is no tier below the device"
            raise KvFull(size, 0, f"{what} ({why})")
        parked = self._prepare(one, length)
        holds = [books.hold(group, part.ids()) for group, part in enumerate(row.chains)]
        try:
            self._save(one, parked, holds, [part.start // BLOCK for part in row.chains], KvFull(size, 0, what))
        except BaseException:
            self._forget(one, parked)
            raise
        finally:
            for hold in holds:
                books.drop(hold)
        with books.lock:
            one.parked, one.promise = parked, None
            row.release()
            cache.batch.idle = True  # a pass now would begin it anew, in blocks of its own
            books.counters.parked += 1

    def resume(self, one: Conversation, cache: TieredCache) -> None:
        """Bring a parked turn back; KvFull while there is no room, KvLost where a block below is no longer right."""
        parked = one.parked
        assert parked is not None, "the pool asks only for parked ones"
        while parked.length and not cache.batch.rows[0].length:
            try:
                self._fill(parked, cache)
            except PlanStale:
                continue
            except Exception as error:
                if is_damage(error):
                    raise KvLost(f"a parked turn of {parked.length} tokens did not come back: {error}") from error
                raise
        one.parked, cache.batch.idle = None, False
        self._forget(one, parked)

    def drop(self, one: Conversation) -> None:
        """Its turn ended while it was parked."""
        parked, one.parked = one.parked, None
        if parked is not None:
            self._forget(one, parked)

    def _prepare(self, one: Conversation, length: int) -> Parked:
        self._made += 1
        root = self._roots.private(one.tenant, f"{one.stamp} {self._made}")
        links, nodes, parent = chain(root, range(length)), [], root
        with self._books.lock:
            for key, tokens in links:
                node = self._books.known.add(parent, tokens, key)
                assert node is not None, "a private root has no other texts"
                nodes.append(node)
                parent = key
        return Parked(root, f"~parked-{root.hex()[:24]}", links, nodes, length, [])

    def _save(self, one: Conversation, parked: Parked, holds: list[Hold], starts: list[int], full: KvFull) -> None:
        below, after = self._below, self._books.lane.computed()
        for group, hold in enumerate(holds):
            for at in range(min(len(hold.blocks), len(parked.nodes) - starts[group])):
                path = parked.nodes[: starts[group] + at + 1]
                if not below.save(path, parked.root, group, hold.blocks[at], after):
                    raise full
                with self._books.lock:
                    handle = path[-1].host[group]
                    if handle is not None:
                        below.use(handle)
                        parked.handles.append(handle)
        if below.cold is not None and parked.length:
            below.cold.note(parked.name, parked.root, range(parked.length))
            below.cold.store.pin(parked.name, one.tenant)

    def _fill(self, parked: Parked, cache: TieredCache) -> None:
        plan, row = self._plan(parked), cache.batch.rows[0]
        if plan.length < parked.length:
            raise KvLost(f"a parked turn of {parked.length} tokens has {plan.length} left: begin it again")
        expected = max(parked.length, cache.batch.expected)
        self._attacher.fill(plan, expected, lambda tables, _: row.adopt(parked.length, tables))

    def _plan(self, parked: Parked) -> Plan:
        with self._books.lock:
            plan = self._planner.in_memory(parked.links, parked.root, parked.length)
        if plan.length == parked.length:
            return plan
        far = self._planner.on_disk(parked.links, parked.root, range(parked.length), plan.length + 1)
        return far if isinstance(far, Plan) else plan

    def _forget(self, one: Conversation, parked: Parked) -> None:
        with self._books.lock:
            for handle in parked.handles:
                self._below.done(handle)
            for node in parked.nodes:
                self._below.forget(node)
            for node in reversed(parked.nodes):
                self._books.known.let_go(node)
        if self._below.cold is not None:
            self._below.cold.store.forget(parked.name, one.tenant)
        self._roots.drop(parked.root)
