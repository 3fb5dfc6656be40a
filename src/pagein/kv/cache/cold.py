"""The disk as the lowest tier of one pool: a text's blocks there, by the groups of its model, for its tenant."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from pagein.kv.answers import Miss
from pagein.kv.blocks.keys import BLOCK
from pagein.kv.cache.form import Form
from pagein.kv.cache.geometry import Geometry
from pagein.kv.cache.known import Node
from pagein.kv.cache.roots import Roots
from pagein.kv.disk.answers import Found, Kept, Policy, Ref
from pagein.kv.disk.prefix import Link, Prefix, pack
from pagein.kv.disk.reading import Hold
from pagein.kv.disk.store import BlockStore

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
        groups = {group.name: self._policy(root, number) for number, group in enumerate(self._geometry.groups)}
        if self._geometry.side_layers and root not in self._roots.privates:
            groups[SIDE] = Policy.exact()
        return self.store.walk(self._prefix_of(root, tokens), groups, at_least=at_least)

    def has(self, node: Node, group: int) -> bool:
        """Tell whether a block is there."""
        return self.store.has(node.key, pack(node.tokens), self._geometry.groups[group].name)

    def has_side(self, node: Node) -> bool:
        """Tell whether the side state at the end of a block is there."""
        return self.store.has(node.key, pack(node.tokens), SIDE)

    def put(self, path: Sequence[Node], root: bytes, group: int, form: Form, flat: Any) -> bool:
        """Write the block at the end of a path; False where the store refuses it."""
        view, size = memoryview(flat.numpy()), form.piece_bytes(len(path[-1].tokens))
        pieces = [view[at : at + size] for at in range(0, len(view), size)]
        name = self._geometry.groups[group].name
        return self._put(path, root, name, self._policy(root, group), pieces, form.name)

    def put_side(self, path: Sequence[Node], root: bytes, flat: Any) -> bool:
        """Write the side state at the end of a path."""
        return self._put(path, root, SIDE, Policy.exact(), [memoryview(flat.numpy())], "side")

    def read(self, ref: Ref, into: Any, layers: slice = slice(None)) -> None:
        """Read layers of a block, verified; BlockDamaged where they are not what was written."""
        self.store.read(ref, memoryview(into.numpy()), layers)

    def hold(self, found: Found) -> Hold | None:
        """Keep what was found from leaving until its `release`; None where some of it left meanwhile."""
        return self.store.hold([ref for refs in found.refs.values() for ref in refs])

    def note(self, conversation: str, root: bytes, tokens: Sequence[int]) -> None:
        """Say that a conversation holds the blocks of a text that were put: the others of it leave."""
        self.store.note_turn(conversation, self._prefix_of(root, tokens))

    def _policy(self, root: bytes, group: int) -> Policy:
        window = self._geometry.groups[group].window
        if window is None:
            return Policy.every()
        return Policy.sliding(window + slack(self._roots, root))

    def _put(
        self, path: Sequence[Node], root: bytes, group: str, policy: Policy, pieces: Sequence[memoryview], form: str
    ) -> bool:
        links = tuple(Link(node.key, pack(node.tokens)) for node in path)
        length = sum(len(node.tokens) for node in path)
        prefix = Prefix(root, self._roots.tenants[root], self._roots.labels[root], links, length)
        begun = time.perf_counter()
        seconds = self._seconds(len(path[-1].tokens))
        kept = self.store.put(prefix, len(path) - 1, group, policy, pieces, seconds=seconds, form=form)
        if isinstance(kept, Kept):
            self._wrote(sum(len(piece) for piece in pieces), time.perf_counter() - begun)
            return True
        return self.store.has(path[-1].key, pack(path[-1].tokens), group)

    def _prefix_of(self, root: bytes, tokens: Sequence[int]) -> Prefix:
        return Prefix.of(root, tokens, tenant=self._roots.tenants[root], model=self._roots.labels[root])


def slack(roots: Roots, root: bytes) -> int:
    """Return how many tokens before a window come back, too: of a turn that waits, as many as its row had."""
    return BLOCK if root in roots.privates else 0
