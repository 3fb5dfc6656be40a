"""Lets a conversation be larger than its device: from blocks into layers that lie below, and into the store at its end.

Only the groups that look at all tokens are stretched; windows and side state are small, and stay on the device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from pagein.errors import BlockDamaged, KvFull
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.geometry import blocks_of
from pagein.kv.cache.row import Chain
from pagein.kv.cache.tiered import TieredCache
from pagein.kv.tiers.attaching import Attacher
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books, Hold
from pagein.kv.tiers.coming import Arrival
from pagein.kv.tiers.conversation import Conversation, Links
from pagein.kv.tiers.known import Node, Text
from pagein.kv.tiers.planning import InHost, OnDevice, Plan, PlanStale, Step
from pagein.kv.tiers.spill import Spill
from pagein.kv.tiers.stretch import Stretch
from pagein.kv.tiers.writing import side_of
from pagein.units import format_bytes

log = logging.getLogger("pagein.kv")


class Stretching:
    """Begins and ends stretches of one pool's turns. In the thread of the cache's user."""

    def __init__(self, books: Books, below: Below, attacher: Attacher) -> None:
        self._books, self._below, self._attacher = books, below, attacher
        groups, geometry = books.geometry.groups, books.geometry
        self.away = frozenset(number for number, group in enumerate(groups) if group.window is None)
        self._layers = sorted((one for number in self.away for one in groups[number].layers), key=lambda one: one.index)
        kept = sum(len(group.layers) for group in groups) + len(geometry.side_layers)
        # Layers that keep nothing may look at those of others, whose slots are not theirs any more by then.
        self._shares = geometry.layers > kept
        self._told = False

    def least(self, tokens: int) -> int | None:
        """Bytes of the device that a turn of so many tokens takes at least; None where it fits, or cannot be stretched.

        Off the CPU every group has its share of the memory for good: there a conversation must fit.
        """
        books = self._books
        if not (self._below.exists and self._layers and books.shares_memory) or self._shares:
            return None
        beside = books.geometry.beside_bytes(tokens)
        if books.bytes_of(books.blocks_for(tokens)) + beside <= books.device.memory:
            return None
        return self.room_for(tokens)

    def room_for(self, tokens: int) -> int:
        """Bytes of the device without which a stretched turn cannot have so many tokens."""
        return self._books.bytes_of(self.windows_for(tokens)) + Stretch.least(self._layers, tokens)

    def windows_for(self, tokens: int) -> tuple[int, ...]:
        """Blocks of each group that such a turn takes: those of windows."""
        every = self._books.blocks_for(tokens)
        return tuple(0 if group in self.away else count for group, count in enumerate(every))

    def stretch(self, one: Conversation, cache: TieredCache, tokens: int) -> None:
        """Let a cache go on in layers, for so many tokens; KvFull, and nothing changed, where it is full below."""
        batch, row = cache.batch, cache.batch.rows[0]
        if batch.stretch is not None:
            return
        if len(batch.rows) > 1:
            size = self._books.bytes_of(self._books.blocks_for(tokens))
            raise KvFull(
                len(batch.rows) * size, self._books.device.memory, f"{len(batch.rows)} rows of {tokens} tokens"
            )
        batch.arrive()
        stretch = self._open(one, max(tokens, row.length))
        try:
            for group in self.away:
                arena, chain = self._books.device.arenas[group], row.chains[group]
                for place, shape in enumerate(chain.group.layers):
                    for at in range(blocks_of(row.length)):
                        count = min(BLOCK, row.length - at * BLOCK)
                        with self._books.gate.passing():  # blocks may move in between
                            pair = arena.read_block(chain.ids()[at], place)
                            keys, values = (part.narrow(1, 0, count).unsqueeze(0).clone() for part in pair)
                        stretch.put(shape.index, at * BLOCK, keys, values)
        except BaseException:
            stretch.close()
            raise
        with self._books.lock:
            for group in self.away:
                row.let_go(group)
        self._begin(cache, stretch, tokens)

    def attach(self, one: Conversation, cache: TieredCache, links: Links, plan: Plan, tokens: int) -> Arrival:
        """Let a cache hold a plan's prefix in layers, instead of what it has; raises as `Attacher.attach`."""
        stretch = self._open(one, tokens)
        try:
            holds, release = self._keep(plan)
            try:
                for group in self.away:
                    for step in plan.steps[group]:
                        rows = min(step.rows, plan.length - step.index * BLOCK)
                        self._fill(stretch, group, step, rows, holds.get((group, step.index)))
            finally:
                release()
            steps = tuple(() if group in self.away else steps for group, steps in enumerate(plan.steps))
            rest = replace(plan, steps=steps)
            arrival = self._attacher.attach(one, cache, links, rest, overlap=False, expected=tokens)
        except BaseException:
            stretch.close()
            raise
        self._begin(cache, stretch, tokens)
        return arrival

    def overflow(self, one: Conversation, tokens: int) -> bool:
        """Stretch a turn that has grown beyond the device; False where it has not, or cannot be."""
        cache = one.cache_ref()
        if cache is None or self.least(tokens) is None:
            return False
        self.stretch(one, cache, tokens)
        with self._books.lock:
            one.promise = self.windows_for(tokens)
        return True

    def leave(self, one: Conversation, cache: TieredCache) -> None:
        """End a stretch: what the tiers below do not have goes there, then all of it is free. It is ``moving``.

        What cannot be saved is dropped and computed anew another time: the answer of the turn is out already.
        """
        books, nodes = self._books, self._nodes(one)
        lost = blocks_of(cache.batch.length)
        try:
            lost = self._save(one, cache, Text(one.root, nodes))
        except Exception as error:  # a disk that fails, no memory left: the turn ended well all the same
            log.warning("a conversation larger than the device is dropped, since it could not be saved: %s", error)
        finally:
            with books.lock:
                cache.reset()
                if one.name is None:  # found again by its tokens only
                    one.kept = None
                    if one.cache_ref() is None:
                        books.conversations.pop(one.id, None)
                if nodes:
                    books.known.let_go(nodes[-1])
        with books.lock:
            books.counters.demoted += 1
            books.counters.dropped += lost

    def _open(self, one: Conversation, tokens: int) -> Stretch:
        """Have room below."""
        what = f"a conversation of {tokens} tokens"
        spill = Spill(self._below, Stretch.piece_bytes(self._layers), what)
        stretch = Stretch(self._books, spill, self._layers, partial(self._available, one))
        try:
            stretch.grow(tokens)
        except BaseException:
            stretch.close()
            raise
        return stretch

    def _begin(self, cache: TieredCache, stretch: Stretch, tokens: int) -> None:
        row = cache.batch.rows[0]
        row.away, cache.batch.stretch = self.away, stretch
        row.moved()
        stretch.prepare(tokens, cache.batch.expected)
        self._books.counters.stretched += 1
        if not self._told:
            self._told = True
            size = self._books.bytes_of(self._books.blocks_for(tokens))
            log.warning(
                "a conversation of %d tokens needs %s of KV, the device has %s: its layers lie below, and each further "
                "token moves %s",
                tokens,
                format_bytes(size),
                format_bytes(self._books.device.memory),
                format_bytes(stretch.moved_for(tokens)),
            )

    def _available(self, one: Conversation) -> int:
        """Bytes that its layers may take: what nobody in a turn has a claim to, and half of the device at most.

        So that others go on beside a turn that is slow.
        """
        books = self._books
        with books.lock:
            others = [other for other in books.conversations.values() if other is not one and not other.parked]
            claims = [books.claim(other) for other in others if other.active or other.pinned]
            pending = sum(map(books.pending, [*others, one]))
            free = books.capacity()[0] - sum(map(books.bytes_of, claims)) - books.bytes_of(books.claim(one)) - pending
            return min(free, books.device.memory // 2)

    def _keep(self, plan: Plan) -> tuple[dict[tuple[int, int], Hold], Callable[[], None]]:
        """Keep what a plan reads from leaving; PlanStale where some of it has, BlockDamaged where the disk lost it.

        Returns holds of what lies on the device, by group and block of the text, and what ends all of it.
        """
        books, below = self._books, self._below
        with books.lock:
            steps = [(group, step) for group in self.away for step in plan.steps[group]]
            for group, step in steps:
                stale = isinstance(step.origin, OnDevice) and step.origin.node.device[group] != step.origin.block
                if stale or (isinstance(step.origin, InHost) and not below.holds(step.origin.handle)):
                    raise PlanStale
            holds = {
                (group, one.index): books.hold(group, [one.origin.block])
                for group, one in steps
                if isinstance(one.origin, OnDevice)
            }
            handles = [step.origin.handle for _, step in steps if isinstance(step.origin, InHost)]
            for handle in handles:
                below.use(handle)
        kept = None
        if plan.found is not None and below.cold is not None:
            kept = below.cold.hold(plan.found)

        def release() -> None:
            for hold in holds.values():
                books.drop(hold)
            for handle in handles:
                below.done(handle)
            if kept is not None:
                kept.release()

        if plan.found is not None and kept is None:
            release()
            raise BlockDamaged("a block on the disk left before it was read")
        return holds, release

    def _fill(self, stretch: Stretch, group: int, step: Step, rows: int, hold: Hold | None) -> None:
        """Write the first rows of one block of a plan to its layers."""
        arena, form = self._books.device.arenas[group], self._below.forms[group]
        if isinstance(step.origin, OnDevice):
            assert hold is not None
            with self._books.gate.passing():  # since the plan was made it may have moved
                flat = arena.pack_block(hold.blocks[0], step.rows)
        elif isinstance(step.origin, InHost):
            assert self._below.host is not None
            flat = form.expand(self._below.host.view(step.origin.handle), step.rows)
        else:
            assert self._below.cold is not None
            packed = self._below.scratch(form.bytes(step.rows))
            self._below.cold.read(step.origin, packed)
            flat = form.expand(packed, step.rows)
        shape = arena.group.shape
        split = shape.heads * step.rows * shape.key_dim
        for layer, piece in zip(
            arena.group.layers, flat.view(shape.dtype).view(len(arena.group.layers), -1), strict=True
        ):
            parts = (piece[:split], shape.key_dim), (piece[split:], shape.value_dim)
            keys, values = (part.view(1, shape.heads, step.rows, dim).narrow(2, 0, rows) for part, dim in parts)
            stretch.put(layer.index, step.index * BLOCK, keys, values)

    def _nodes(self, one: Conversation) -> list[Node]:
        """The blocks of its text, known for as long as they are written."""
        nodes: list[Node] = []
        parent = one.root
        with self._books.lock:
            for key, tokens in one.links:
                node = self._books.known.add(parent, tokens, key)
                if node is None:  # another text has this key: what follows cannot be named
                    break
                nodes.append(node)
                parent = key
        return nodes

    def _save(self, one: Conversation, cache: TieredCache, text: Text) -> int:
        """Write what lies nowhere below yet; returns how many blocks are lost."""
        books, row, lost = self._books, cache.batch.rows[0], blocks_of(cache.batch.length) - len(text.nodes)
        after = books.lane.computed()
        for index, node in enumerate(text.nodes):
            for group, chain in enumerate(row.chains):
                at = index - chain.start // BLOCK
                if self._below.has(node, group):
                    continue
                if group in self.away:
                    packed = self._packed(cache.batch.stretch, group, index * BLOCK, len(node.tokens))
                    lost += not self._below.save(text, index, group, None, after, packed)
                elif 0 <= at < len(chain.blocks):
                    lost += not self._save_block(text, index, group, chain, at, after)
        side = side_of(cache, one)
        if side is not None and len(text.nodes) == blocks_of(cache.batch.length):
            self._below.save_side(text, side)
        if self._below.cold is not None and text.nodes:
            self._below.cold.note(one.disk_name, one.root, one.tokens)
        return lost

    def _save_block(self, text: Text, index: int, group: int, chain: Chain, at: int, after: Any) -> bool:
        with self._books.lock:  # ids may change without it
            block = chain.blocks[at]
            assert block is not None, "a row in use has its blocks on the device"
            hold = self._books.hold(group, [block])
        try:
            return self._below.save(text, index, group, hold, after)
        finally:
            self._books.drop(hold)

    def _packed(self, stretch: Stretch | None, group: int, first: int, rows: int) -> torch.Tensor:
        """A block of layers as the tiers below keep it."""
        assert stretch is not None
        parts: Sequence[torch.Tensor] = [
            half.reshape(-1)
            for shape in self._books.geometry.groups[group].layers
            for half in stretch.rows(shape.index, first, first + rows)
        ]
        packed: torch.Tensor = self._below.forms[group].shrink(torch.cat(parts).view(torch.uint8), rows)
        return packed
