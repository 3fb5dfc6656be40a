"""Which blocks a conversation holds, and what leaves when it goes on or is forgotten (pure).

A conversation holds the texts up to its checkpoints: where its turns ended. Where a model needs a window or a state of
exactly that length, the last few stay, so that a turn can be edited; else only those on other branches do, and what a
longer text replaced leaves at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagein.kv.disk.answers import Kind
from pagein.kv.disk.tree import Block, Holder, Node, Tree, wanted_by

MOST_CHECKPOINTS = 4
"""Of one conversation with one model."""


def note(tree: Tree, holder: Holder, node: Node, now: float) -> list[Block]:
    """A turn of a conversation ended at a node; return the blocks that left for it."""
    turns = tree.turns.setdefault(holder, {})
    if turns.pop(node, None) is None:
        tree.tails.setdefault(node, set()).add(holder)
        for held in node.up():
            held.holds += 1
    turns[node] = now
    tree.changes.turn(holder, node, now)
    path = set(node.up())
    done = [turn for turn in turns if turn is not node and _replaced(turn, path)]
    rest = [turn for turn in turns if turn not in done and turn.root is node.root]
    done += rest[: max(0, len(rest) - MOST_CHECKPOINTS)]
    left: list[Block] = []
    for turn in done:
        if turn in turns:  # else it went with another one, and the checkpoint moved up
            left += release(tree, holder, turn)
    return left


def forget(tree: Tree, holder: Holder) -> list[Block]:
    """A conversation holds nothing any more; return the blocks that left with it."""
    left: list[Block] = []
    while holder in tree.turns:
        left += release(tree, holder, next(iter(tree.turns[holder])))
    return left


def release(tree: Tree, holder: Holder, node: Node) -> list[Block]:
    """End one checkpoint; return the blocks that nobody needs now."""
    turns = tree.turns[holder]
    del turns[node]
    if not turns:
        del tree.turns[holder]
    tree.tails[node].remove(holder)
    if not tree.tails[node]:
        del tree.tails[node]
    tree.changes.no_turn(holder, node)
    path = list(node.up())
    for held in path:
        held.holds -= 1
    unheld = [one for one in path if not one.holds]  # with the highest of them all below it, too
    left = tree.clear(unheld[-1]) if unheld else []
    return left + _trim(tree, path[len(unheld) :])


def held_by(tree: Tree, holders: Iterable[Holder]) -> set[Node]:
    """All nodes that some conversations hold."""
    held: set[Node] = set()
    for holder in holders:
        for turn in tree.turns.get(holder, ()):
            for node in turn.up():
                if node in held:
                    break
                held.add(node)
    return held


def _replaced(turn: Node, path: set[Node]) -> bool:
    """Whether a text that goes along a path serves all that an earlier checkpoint does."""
    if any(block.policy.kind is not Kind.EVERY for block in turn.blocks.values()):
        return False
    if turn in path:
        return True
    return any(one.parent is turn.parent and one.tokens.startswith(turn.tokens) for one in path)


def _trim(tree: Tree, path: Iterable[Node]) -> list[Block]:
    """Take windows and states out that no checkpoint needs, of nodes that stay; the lowest come first."""
    left: list[Block] = []
    for node in path:
        kinds = [block for block in node.blocks.values() if block.policy.kind is not Kind.EVERY]
        done = [block for block in kinds if not wanted_by(node, block.policy, tree)]
        left += [tree.detach(node, block.group) for block in done]
        tree.prune(node)
    return left
