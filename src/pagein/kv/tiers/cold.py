"""The disk as the lowest tier of one pool: a text's blocks there, by the groups of its model, for its tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pagein.kv.cache.geometry import Geometry
from pagein.kv.disk.answers import Found, Kept, Policy, Ref
from pagein.kv.disk.checking import check
from pagein.kv.disk.prefix import Link, Prefix, pack
from pagein.kv.disk.reading import Hold
from pagein.kv.disk.store import BlockStore
from pagein.kv.snapshots.answers import Miss
from pagein.kv.tiers.form import Form
from pagein.kv.tiers.known import Node, Text
from pagein.kv.tiers.roots import Roots

SIDE = "side"
"""The group of side state: one piece, at exactly one length."""


class Cold:
    """Asks and fills a `BlockStore`. Any thread; blocks on the disk."""

    def __init__(
        self,
        store: BlockStore,
        geometry: Geometry,
        roots: Roots,
        seconds: Callable[[int], float],
        wrote: Callable[[int, float], None],
    ) -> None:
        """``roots``: whose they are; ``seconds``: to compute so many tokens; ``wrote``: told bytes and seconds."""
        self.store = store
        self._geometry, self._roots = geometry, roots
        self._seconds, self._wrote = seconds, wrote

    def find(self, root: bytes, tokens: Sequence[int], at_least: int) -> Found | Miss:
        """Return the longest prefix of a text that every group, and the side state, can serve."""
        groups = {group.name: self._policy(number) for number, group in enumerate(self._geometry.groups)}
        if self._geometry.side_layers:
            groups[SIDE] = Policy.exact()
        return self.store.walk(self._prefix_of(root, tokens), groups, at_least=at_least)

    def has(self, node: Node, group: int) -> bool:
        """Tell whether a block is there."""
        return self.store.has(node.key, pack(node.tokens), self._geometry.groups[group].name)

    def has_side(self, node: Node) -> bool:
        """Tell whether the side state at the end of a block is there."""
        return self.store.has(node.key, pack(node.tokens), SIDE)

    def put(self, text: Text, index: int, group: int, form: Form, flat: Any) -> bool:
        """Write a block of a text; False where the store refuses it."""
        view, size = memoryview(flat.numpy()), form.piece_bytes(len(text.nodes[index].tokens))
        pieces = [view[at : at + size] for at in range(0, len(view), size)]
        name = self._geometry.groups[group].name
        return self._put(text, index, name, self._policy(group), pieces, form.name)

    def put_side(self, text: Text, flat: Any) -> bool:
        """Write the side state at the end of a text."""
        return self._put(text, len(text.nodes) - 1, SIDE, Policy.exact(), [memoryview(flat.numpy())], "side")

    def read(self, ref: Ref, into: Any, layers: slice = slice(None)) -> None:
        """Read layers of a block, verified; BlockDamaged where they are not what was written."""
        self.store.read(ref, memoryview(into.numpy()), layers)

    def read_whole(self, refs: Sequence[Ref], into: Any) -> None:
        """Read whole blocks, back to back and verified; BlockDamaged where one is not what was written."""
        self.store.read_whole(refs, memoryview(into.numpy()))

    def check(self, after: str | None) -> dict[str, Any]:
        """Read a part of the store through, JSON-ready."""
        return check(self.store, after).told()

    def hold(self, found: Found) -> Hold | None:
        """Keep what was found from leaving until its `release`; None where some of it left meanwhile."""
        return self.store.hold([ref for refs in found.refs.values() for ref in refs])

    def note(self, conversation: str, root: bytes, tokens: Sequence[int]) -> None:
        """Say that a conversation holds the blocks of a text that were put: the others of it leave."""
        self.store.note_turn(conversation, self._prefix_of(root, tokens))

    def _policy(self, group: int) -> Policy:
        window = self._geometry.groups[group].window
        return Policy.every() if window is None else Policy.sliding(window)

    def _put(self, text: Text, index: int, group: str, policy: Policy, pieces: Sequence[memoryview], form: str) -> bool:
        prefix, begun = self._prefix_for(text), time.perf_counter()
        seconds = self._seconds(len(text.nodes[index].tokens))
        kept = self.store.put(prefix, index, group, policy, pieces, seconds=seconds, form=form)
        if isinstance(kept, Kept):
            self._wrote(sum(len(piece) for piece in pieces), time.perf_counter() - begun)
            return True
        link = prefix.links[index]
        return self.store.has(link.key, link.tokens, group)

    def _prefix_for(self, text: Text) -> Prefix:
        """What the store knows a text by, made once for all its blocks."""
        if text.prefix is None:
            links = tuple(Link(node.key, pack(node.tokens)) for node in text.nodes)
            length = sum(len(node.tokens) for node in text.nodes)
            tenant, label = self._roots.tenants[text.root], self._roots.labels[text.root]
            text.prefix = Prefix(text.root, tenant, label, links, length)
        return text.prefix

    def _prefix_of(self, root: bytes, tokens: Sequence[int]) -> Prefix:
        return Prefix.of(root, tokens, tenant=self._roots.tenants[root], model=self._roots.labels[root])
