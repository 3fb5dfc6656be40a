"""Conversations for people (pure)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection

from pagein.kv.disk.answers import ConversationEntry
from pagein.kv.disk.tree import Holder, Node, Tree


def entries(tree: Tree, pinned: Collection[Holder], now: float) -> list[ConversationEntry]:
    """All conversations, the last used first."""
    found = [_entry(holder, turns, holder in pinned, now) for holder, turns in tree.turns.items()]
    return sorted(found, key=lambda one: (one.idle_seconds, one.tenant, one.conversation))


def _entry(holder: Holder, turns: dict[Node, float], pinned: bool, now: float) -> ConversationEntry:
    held = Counter(node for turn in turns for node in turn.up())
    sizes = {node: sum(block.slot.size for block in node.blocks.values()) for node in held}
    own = sum(sizes[node] for node, times in held.items() if node.holds == times)
    last, used = next(reversed(turns.items()))
    idle = now - max(used, last.used)
    return ConversationEntry(
        *holder, last.model, max(turn.end for turn in turns), sum(sizes.values()), own, max(0.0, idle), pinned
    )
