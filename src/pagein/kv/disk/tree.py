"""What the store knows while it is open (pure): texts as a tree of blocks, and which conversations hold which.

Below a root (what computed the KV, and whose) every node stands for up to 64 tokens and all before them. A node has the
blocks of its groups; one without a child always has some. What changes is noted in `changes`, for the catalogue.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.disk.answers import Kind, Policy, Ref
from pagein.kv.disk.changes import Changes
from pagein.kv.disk.layout import offsets
from pagein.kv.disk.prefix import TOKEN, Prefix
from pagein.kv.disk.segments import Slot


class Holder(NamedTuple):
    """A conversation of a tenant."""

    tenant: str
    conversation: str


@dataclass(slots=True, eq=False)
class Block:
    """The block of one group."""

    group: str
    policy: Policy
    form: str
    lengths: tuple[int, ...]
    digests: bytes
    slot: Slot
    seconds: float | None
    """To compute it anew."""
    offsets: tuple[int, ...] = ()
    """Where its pieces begin in the slot."""
    gap: int = 0
    """Bytes of the slot behind the last one."""
    even: bool = False
    """All of them are whole pages."""
    readers: int = 0
    """Its slot is nobody else's as long as there are some."""
    gone: bool = False

    def __post_init__(self) -> None:
        self.offsets = tuple(offsets(self.lengths))
        self.gap = self.slot.size - self.offsets[-1]
        self.even = self.offsets[-1] == sum(self.lengths)


@dataclass(slots=True, eq=False)
class Node:
    """A block of a text, with all before it; or a root."""

    key: bytes
    parent: Node | None
    tokens: bytes
    end: int
    """Tokens up to here."""
    tenant: str
    model: str
    used: float = 0.0
    holds: int = 0
    """Checkpoints at it or below it, of all conversations."""
    children: dict[bytes, Node] = field(default_factory=dict)
    blocks: dict[str, Block] = field(default_factory=dict)

    @property
    def begin(self) -> int:
        """Tokens before it."""
        return self.end - len(self.tokens) // TOKEN

    @property
    def index(self) -> int:
        """Which block of its text it is."""
        return self.begin // BLOCK

    @property
    def root(self) -> Node:
        """What it stands below."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def up(self) -> Iterator[Node]:
        """This node and those before it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def below(self) -> Iterator[Node]:
        """This node and all below it, the lowest first."""
        order, waiting = [], [self]
        while waiting:
            order.append(waiting.pop())
            waiting.extend(order[-1].children.values())
        return reversed(order)

    def ref(self, group: str, index: int, rows: int) -> Ref:
        """How the block of a group is named to whoever reads it."""
        block, tokens = self.blocks[group], len(self.tokens) // TOKEN
        return Ref(self.key, group, index, self.begin, rows, tokens, block.form, block.lengths)


class Tree:
    """All texts of a store."""

    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {}
        """Roots, too, by key."""
        self.leaves: set[Node] = set()
        self.turns: dict[Holder, dict[Node, float]] = {}
        """The checkpoints of a conversation, the oldest first: where its turns ended, and when."""
        self.tails: dict[Node, set[Holder]] = {}
        """The same by node."""
        self.blocks = 0
        self.changes = Changes()

    def path(self, prefix: Prefix) -> Sequence[Node]:
        """The nodes that a text goes along, all proven by their tokens; each once, for as long as it stays.

        What is returned is the prefix's own, and changes when it is asked again.
        """
        found = prefix.trail
        while found and self.nodes.get(found[-1].key) is not found[-1]:
            found.pop()  # a node leaves before the one that it stands on
        node = found[-1] if found else self.nodes.get(prefix.root)
        if node is None or (not found and node.parent is not None):
            return found
        for at in range(len(found), len(prefix.links)):
            link = prefix.links[at]
            node = node.children.get(link.key)
            if node is None or node.tokens != link.tokens:
                break
            found.append(node)
        return found

    def collides(self, prefix: Prefix, count: int, known: int) -> bool:
        """Whether a key of the first blocks of a text stands for something else; so many of them are `path`'s."""
        root = self.nodes.get(prefix.root)
        if root is not None and root.parent is not None:
            return True
        seen = {prefix.root}  # the known ones' keys are among the nodes
        for link in prefix.links[known:count]:
            if link.key in self.nodes or link.key in seen:
                return True
            seen.add(link.key)
        return False

    def grow(self, prefix: Prefix, count: int, now: float) -> Node | None:
        """Make sure of the nodes of the first blocks of a text and return the last; a block must be attached to it.

        None where a key of them stands for something else.
        """
        path = self.path(prefix)
        if self.collides(prefix, count, len(path)):
            return None
        node = self.nodes.get(prefix.root) or self.add_root(prefix.root, prefix.tenant, prefix.model)
        node = path[min(count, len(path)) - 1] if path else node
        for link in prefix.links[len(path) : count]:
            node = self.add(link.key, node, link.tokens, now)
        return node

    def add_root(self, key: bytes, tenant: str, model: str) -> Node:
        """Add what texts stand below."""
        root = self.nodes[key] = Node(key, None, b"", 0, tenant, model)
        self.changes.root(root)
        return root

    def add(self, key: bytes, parent: Node, tokens: bytes, used: float) -> Node:
        """Add a node."""
        end = parent.end + len(tokens) // TOKEN
        node = Node(key, parent, tokens, end, parent.tenant, parent.model, used)
        self.nodes[key] = parent.children[key] = node
        self.leaves.discard(parent)
        self.leaves.add(node)
        self.changes.node(node)
        return node

    def attach(self, node: Node, block: Block) -> None:
        """Give a node its block of a group."""
        assert block.group not in node.blocks
        node.blocks[block.group] = block
        self.blocks += 1
        self.changes.block(node, block)

    def detach(self, node: Node, group: str) -> Block:
        """Take a block out; `prune` must follow."""
        block = node.blocks.pop(group)
        block.gone = True
        self.blocks -= 1
        self.changes.no_block(node, group)
        return block

    def prune(self, node: Node) -> None:
        """Remove a node, and those before it, that have nothing left; who ended there now ends before it."""
        while not node.blocks and not node.children and self.nodes.get(node.key) is node:
            parent = node.parent
            del self.nodes[node.key]
            self.changes.no_node(node)
            if parent is None:
                return
            for holder in self.tails.pop(node, set()):
                self._retract(holder, node, parent)
            self.leaves.remove(node)
            del parent.children[node.key]
            if not parent.children and parent.parent is not None:
                self.leaves.add(parent)
            node = parent

    def clear(self, top: Node) -> list[Block]:
        """Remove a node and all below it; return the blocks."""
        blocks: list[Block] = []
        for node in list(top.below()):
            blocks += [self.detach(node, group) for group in list(node.blocks)]
            self.prune(node)
        return blocks

    def holders(self, node: Node) -> Iterator[Holder]:
        """The conversations that end at a node."""
        return iter(self.tails.get(node, ()))

    def _retract(self, holder: Holder, node: Node, parent: Node) -> None:
        turns = self.turns[holder]
        at = turns.pop(node)
        self.changes.no_turn(holder, node)
        if parent.parent is not None and parent not in turns:
            turns[parent] = at
            self.turns[holder] = dict(sorted(turns.items(), key=lambda turn: turn[1]))
            self.tails.setdefault(parent, set()).add(holder)
            self.changes.turn(holder, parent, at)
            return
        for held in parent.up():
            held.holds -= 1
        if not turns:
            del self.turns[holder]


def wanted_by(node: Node, policy: Policy, tree: Tree) -> bool:
    """Whether a checkpoint at a node or below it needs the node's block of a group that does not need all."""
    if policy.kind is Kind.EVERY:
        return True
    waiting = [node]
    while waiting:
        one = waiting.pop()
        if one in tree.tails and (one is node if policy.kind is Kind.EXACT else policy.first_token(one.end) < node.end):
            return True
        if policy.kind is Kind.SLIDING:
            waiting += [child for child in one.children.values() if policy.first_token(child.begin + 1) < node.end]
    return False
