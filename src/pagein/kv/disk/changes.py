"""What is to be written into the catalogue (pure): the last word for each row, deletions before additions."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagein.kv.disk.tree import Block, Holder, Node, Tree

Value = bytes | str | int | float | None
Row = tuple[Value, ...]


@dataclass(slots=True)
class Changes:
    """By table: a row by its key, or None where it goes."""

    roots: dict[Row, Row | None] = field(default_factory=dict)
    nodes: dict[Row, Row | None] = field(default_factory=dict)
    blocks: dict[Row, Row | None] = field(default_factory=dict)
    turns: dict[Row, Row | None] = field(default_factory=dict)
    used: dict[bytes, float] = field(default_factory=dict)
    """When nodes were last used: a hint, kept outside what the seal of a row covers."""

    @classmethod
    def everything(cls, tree: Tree) -> Changes:
        """All that a tree has, for an empty catalogue."""
        changes = cls()
        for node in tree.nodes.values():
            (changes.root if node.parent is None else changes.node)(node)
            for block in node.blocks.values():
                changes.block(node, block)
        for holder, turns in tree.turns.items():
            for node, at in turns.items():
                changes.turn(holder, node, at)
        return changes

    def __bool__(self) -> bool:
        return bool(self.roots or self.nodes or self.blocks or self.turns)

    def root(self, root: Node) -> None:
        """A root is new."""
        self.roots[(root.key,)] = (root.key, root.tenant, root.model)

    def node(self, node: Node) -> None:
        """A node is new."""
        assert node.parent is not None
        self.nodes[(node.key,)] = (node.key, node.parent.key, node.tokens)
        self.used[node.key] = node.used

    def no_node(self, node: Node) -> None:
        """A node, or a root, goes."""
        (self.nodes if node.parent is not None else self.roots)[(node.key,)] = None
        self.used.pop(node.key, None)

    def block(self, node: Node, block: Block) -> None:
        """A block is new."""
        lengths = ",".join(map(str, block.lengths))
        what = (node.key, block.group, int(block.policy.kind), block.policy.window, block.form)
        self.blocks[node.key, block.group] = (*what, lengths, block.digests, *block.slot, block.seconds)

    def no_block(self, node: Node, group: str) -> None:
        """A block goes."""
        self.blocks[node.key, group] = None

    def turn(self, holder: Holder, node: Node, at: float) -> None:
        """A conversation holds a node."""
        self.turns[(*holder, node.key)] = (*holder, node.key, at)

    def no_turn(self, holder: Holder, node: Node) -> None:
        """A conversation holds a node no longer."""
        self.turns[(*holder, node.key)] = None
