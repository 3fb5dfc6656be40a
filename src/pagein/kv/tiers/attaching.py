"""Makes a cache hold the prefix of a plan: shares what is there, takes blocks for the rest, and brings it up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pagein.errors import BlockDamaged
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.reading import stock_layers
from pagein.kv.cache.side import unpack_side
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.disk.answers import Ref
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.coming import Arrival, Item
from pagein.kv.tiers.conversation import Conversation, Links
from pagein.kv.tiers.mover import Mover
from pagein.kv.tiers.planning import InHost, OnDevice, Plan, PlanStale, Step

Adopt = Callable[[list[tuple[int, list[int | None]]], "list[Item]"], None]
"""Takes over first token and blocks of each group, with their holders, and what came; called with the lock."""


class _Table:
    """The blocks of a group that a plan comes to: some shared, the others taken anew."""

    def __init__(self, books: Books, group: int, steps: Sequence[Step]) -> None:
        self._books, self.group, self.steps = books, group, steps
        self.lacking = [step for step in steps if not isinstance(step.origin, OnDevice)]
        shared = [one.origin for one in steps if isinstance(one.origin, OnDevice)]
        if any(one.node.device[group] != one.block for one in shared):
            raise PlanStale
        self._shared = books.hold(group, [one.block for one in shared])
        self._fresh: Hold | None = None

    def take(self, expected: int) -> None:
        """Take the blocks that lack; KvFull where there are none."""
        taken = self._books.device.take(self.group, len(self.lacking), None, expected) if self.lacking else []
        self._fresh = self._books.adopt_taken(self.group, taken)

    def items(self) -> list[Item]:
        """What has to come up, and where to."""
        assert self._fresh is not None
        found = []
        for at, step in enumerate(self.lacking):
            assert not isinstance(step.origin, OnDevice)
            source = step.origin.handle if isinstance(step.origin, InHost) else step.origin
            found.append(Item(self.group, self._fresh, at, step.index, step.rows, source, step.exact))
        return found

    def hand_over(self) -> tuple[int, list[int | None]]:
        """Return first token and blocks in order, with their holders (with the lock)."""
        assert self._fresh is not None
        shared, fresh = iter(self._books.hand_over(self._shared)), iter(self._books.hand_over(self._fresh))
        ids: list[int | None] = [next(shared if isinstance(one.origin, OnDevice) else fresh) for one in self.steps]
        return (self.steps[0].index * BLOCK if self.steps else 0), ids

    def drop(self) -> None:
        """Let go of all; nothing once handed over."""
        self._books.drop(self._shared)
        if self._fresh is not None:
            self._books.drop(self._fresh)


class Attacher:
    """Carries plans out. In the thread of the cache's user, or the mover's for a cache that is idle."""

    def __init__(self, books: Books, below: Below, mover: Mover) -> None:
        self._books, self._below, self._mover = books, below, mover

    def attach(
        self, conversation: Conversation, cache: TieredCache, links: Links, plan: Plan, *, overlap: bool, expected: int
    ) -> Arrival:
        """Let the cache hold the plan's prefix instead of what it has; ``links`` name its blocks, ``expected`` tokens.

        Raises KvFull where blocks lack, BlockDamaged where one is not what was written or has left; the cache is then
        as before.
        """
        with self._books.lock:
            side = self._side_in_memory(plan)
        if side is None:
            side = self._side_on_disk(plan)
        layers: list[Any] = []
        if side is not None:  # before anything is changed: it may be of other layers
            layers = [stock_layers(cache.geometry)[index] for index in cache.geometry.side_layers]
            unpack_side(side, layers, self._books.device.device)

        def adopt(tables: list[tuple[int, list[int | None]]], came: list[Item]) -> None:
            cache.reset()
            if layers:
                for index, layer in zip(cache.geometry.side_layers, layers, strict=True):
                    cache.layers[index] = layer
            row = cache.batch.rows[0]
            row.adopt(plan.length, tables)
            cache.batch.adopt(row)
            cache.batch.tokens[:] = [token for _, tokens in links for token in tokens][: plan.length]
            self.name(links, conversation.root, came)  # by ids that may move once the lock is free

        arrival, later, kept = self._fill(plan, expected, adopt, overlap=overlap)
        if not later:
            _call(kept)
            return arrival
        return self._in_flight(conversation, cache, links, later, kept, arrival)

    def fill(self, plan: Plan, expected: int, adopt: Adopt) -> None:
        """Bring a plan's blocks and hand them to whoever adopts them; raises as `attach`."""
        _call(self._fill(plan, expected, adopt, overlap=False)[2])

    def _fill(
        self, plan: Plan, expected: int, adopt: Adopt, *, overlap: bool
    ) -> tuple[Arrival, list[Item], list[Callable[[], None]]]:
        """Return what came, those that are still to come, and what is to be called after them."""
        books = self._books
        with books.lock:
            kept = self._keep_hosts(plan)
            tables: list[_Table] = []
            try:
                for group, steps in enumerate(plan.steps):
                    tables.append(_Table(books, group, steps))  # those made are dropped where one fails
            except PlanStale:
                _drop(tables, kept)
                raise
        try:
            if plan.found is not None:
                kept.append(self._keep_disk(plan))
            for table in tables:
                table.take(-(-expected // BLOCK))
            # A partly filled tail comes first: what the turn adds to it may copy it before any layer is waited for.
            now, later = _split(tables, overlap=overlap)
            arrival = Arrival(books, self._below, now)
            arrival.all_at_once()
            with books.lock:
                now, later = self._settled(now), self._rebased(later)
                adopt([table.hand_over() for table in tables], now)
        except BaseException:
            _drop(tables, kept)
            raise
        return arrival, later, kept

    def name(self, links: Links, root: bytes, items: Sequence[Item]) -> None:
        """Note what lies in blocks that came up (with the lock)."""
        named = [item for item in items if item.exact]
        nodes, parent = [], root
        for key, tokens in links[: max((item.index + 1 for item in named), default=0)]:
            node = self._books.known.add(parent, tokens, key)
            if node is None:
                break
            nodes.append(node)
            parent = key
        for item in named:
            if item.index < len(nodes):
                self._books.known.place(nodes[item.index], item.group, item.block)
        if nodes:
            self._books.known.let_go(nodes[-1])

    def _in_flight(
        self,
        conversation: Conversation,
        cache: TieredCache,
        links: Links,
        items: list[Item],
        kept: list[Callable[[], None]],
        first: Arrival,
    ) -> Arrival:
        """Bring the rest in the mover's thread; the turn waits layer by layer."""
        books, root = self._books, conversation.root

        def end() -> None:
            arrival.finish()
            with books.lock:
                if arrival.failed is None:
                    self.name(links, root, items)
                for hold in {id(item.hold): item.hold for item in items}.values():
                    books.drop(hold)
            _call(kept)

        arrival = Arrival(books, self._below, items)
        arrival.bytes, arrival.disk_bytes = first.bytes, first.disk_bytes
        cache.landed = arrival.landed
        arrival.move = self._mover.add(arrival.steps(), "a promotion", urgent=True, on_end=end)
        return arrival

    def _rebased(self, items: Sequence[Item]) -> list[Item]:
        """The same blocks, each with a holder that stays until it has arrived (with the lock)."""
        return [replace(item, hold=self._books.hold(item.group, [item.block]), at=0) for item in items]

    def _settled(self, items: Sequence[Item]) -> list[Item]:
        """The same blocks by the ids that they have now."""
        return [replace(item, hold=Hold(item.group, [item.block]), at=0) for item in items]

    def _keep_hosts(self, plan: Plan) -> list[Callable[[], None]]:
        """Keep slots of host memory until they were read (with the lock)."""
        origins = [step.origin for steps in plan.steps for step in steps] + ([plan.side] if plan.side else [])
        handles = [one.handle for one in origins if isinstance(one, InHost)]
        if not all(self._below.holds(handle) for handle in handles):
            raise PlanStale
        for handle in handles:
            self._below.use(handle)
        return [partial(self._below.done, handle) for handle in handles]

    def _keep_disk(self, plan: Plan) -> Callable[[], None]:
        assert plan.found is not None
        assert self._below.cold is not None
        kept = self._below.cold.hold(plan.found)
        if kept is None:
            raise BlockDamaged("a block on the disk left before it was read")
        return kept.release

    def _side_in_memory(self, plan: Plan) -> Any:
        """Return a copy of the side state that lies in host memory (with the lock)."""
        if not isinstance(plan.side, InHost):
            return None
        if not self._below.holds(plan.side.handle):
            raise PlanStale
        assert self._below.host is not None
        return self._below.host.view(plan.side.handle).clone()

    def _side_on_disk(self, plan: Plan) -> Any:
        if not isinstance(plan.side, Ref):
            return None
        assert self._below.cold is not None
        flat = torch.empty(plan.side.bytes, dtype=torch.uint8)
        self._below.cold.read(plan.side, flat)
        return flat


def _split(tables: Sequence[_Table], *, overlap: bool) -> tuple[list[Item], list[Item]]:
    """What comes before the turn computes, and what may come meanwhile."""
    items = [(item, table.steps[-1].index) for table in tables for item in table.items()]
    if not overlap:
        return [item for item, _ in items], []
    return [item for item, last in items if item.index == last], [item for item, last in items if item.index != last]


def _drop(tables: Sequence[_Table], kept: list[Callable[[], None]]) -> None:
    for table in tables:
        table.drop()
    _call(kept)


def _call(every: list[Callable[[], None]]) -> None:
    while every:
        every.pop()()
