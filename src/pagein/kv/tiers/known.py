"""Which blocks are known by their content, and where they lie in memory. Pure; holds no reference to any block.

A tree of keys: what follows a block are its children. A place is noted when a block is sealed, and taken back when the
block is freed or cut: the arena says so (`freed`, `cut`), so that no key ever names other content.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pagein.kv.blocks.keys import BLOCK, next_key
from pagein.kv.disk.prefix import Prefix


@dataclass(slots=True, eq=False)
class Node:
    """A block's content and its places, by group."""

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    device: list[int | None]
    """Block of the arena that begins with these tokens' KV."""
    host: list[int | None]
    """Handle in host memory."""
    side: int | None = None
    """Handle of the side state at the end of this block, in host memory."""
    children: dict[bytes, None] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """True for a block of 64 tokens."""
        return len(self.tokens) == BLOCK

    @property
    def held(self) -> bool:
        """True where it lies anywhere in memory."""
        return self.side is not None or any(one is not None for one in (*self.device, *self.host))


@dataclass(slots=True, eq=False)
class Text:
    """Blocks of a text, from the first on; whoever writes several of them makes it once."""

    root: bytes
    nodes: Sequence[Node]
    prefix: Prefix | None = None
    """What the disk calls it, once it was asked."""


class Known:
    """The tree. Not thread-safe: its pool has a lock."""

    def __init__(self, groups: int) -> None:
        self._groups = groups
        self._nodes: dict[bytes, Node] = {}
        self._roots: dict[bytes, dict[bytes, None]] = {}
        self._at: dict[tuple[int, int], dict[bytes, None]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, key: bytes) -> Node | None:
        """Return the block of a key; the caller compares the tokens."""
        return self._nodes.get(key)

    def find(self, parent: bytes, tokens: Sequence[int]) -> Node | None:
        """Return the block that follows ``parent`` with exactly these tokens."""
        node = self._nodes.get(next_key(parent, tokens))
        return node if node is not None and node.tokens == tuple(tokens) and node.parent == parent else None

    def add(self, parent: bytes, tokens: Sequence[int], key: bytes | None = None) -> Node | None:
        """Return the block with this content, new or known; None where its key is another content's already."""
        key = next_key(parent, tokens) if key is None else key
        node = self._nodes.get(key)
        if node is None:
            node = Node(key, parent, tuple(tokens), [None] * self._groups, [None] * self._groups)
            node.children = self._roots.pop(key, {})
            self._nodes[key] = node
            self._children(parent)[key] = None
        return node if node.tokens == tuple(tokens) and node.parent == parent else None

    def children(self, parent: bytes) -> Iterator[Node]:
        """Yield what follows a block."""
        node = self._nodes.get(parent)
        keys = node.children if node is not None else self._roots.get(parent, {})
        return (self._nodes[key] for key in list(keys))

    def place(self, node: Node, group: int, block: int) -> None:
        """Note that a block of the arena begins with a node's content; a place known before stays the one."""
        if node.device[group] is None:
            node.device[group] = block
            self._at.setdefault((group, block), {})[node.key] = None

    def freed(self, group: int, block: int) -> None:
        """The arena has a block back."""
        for key in self._at.pop((group, block), {}):
            self._unplace(self._nodes[key], group)

    def cut(self, group: int, block: int, rows: int) -> None:
        """Of a block only the first rows stay as they are: what it was for longer content it no longer is."""
        keys = self._at.get((group, block), {})
        for key in [key for key in keys if len(self._nodes[key].tokens) > rows]:
            del keys[key]
            self._unplace(self._nodes[key], group)
        if not keys:
            self._at.pop((group, block), None)

    def moved(self, group: int, moved: Mapping[int, int]) -> None:
        """Contents of blocks lie in other ones now: old id to new."""
        taken = {block: self._at.pop((group, block), {}) for block in moved}
        for block, keys in taken.items():
            for key in keys:
                self._nodes[key].device[group] = moved[block]
            if keys:
                self._at[group, moved[block]] = keys

    def only(self, node: Node, group: int, block: int) -> None:
        """Note a place, and let go of names for the beginning of what lies there: the longer one serves for them."""
        keys = self._at.get((group, block), {})
        for key in [key for key in keys if key != node.key]:
            del keys[key]
            self._unplace(self._nodes[key], group)
        self.place(node, group, block)

    def let_go(self, node: Node) -> None:
        """Forget a node that lies nowhere and that nothing known follows; its parents too."""
        while not node.held and not node.children and self._nodes.get(node.key) is node:
            del self._nodes[node.key]
            siblings = self._children(node.parent)
            siblings.pop(node.key, None)
            above = self._nodes.get(node.parent)
            if above is None:
                if not siblings:
                    self._roots.pop(node.parent, None)
                return
            node = above

    def path(self, node: Node) -> tuple[list[Node], bytes]:
        """Return the nodes from the first to one, and the root that they stand below."""
        found = [node]
        while (above := self._nodes.get(found[-1].parent)) is not None:
            found.append(above)
        return found[::-1], found[-1].parent

    def nodes(self) -> Iterator[Node]:
        """Yield all that is known."""
        return iter(list(self._nodes.values()))

    def _children(self, parent: bytes) -> dict[bytes, None]:
        node = self._nodes.get(parent)
        return node.children if node is not None else self._roots.setdefault(parent, {})

    def _unplace(self, node: Node, group: int) -> None:
        node.device[group] = None
        self.let_go(node)
