"""Who leaves for a block (pure): the least worth its bytes first, and never a block before what stands on it."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence

from pagein.kv.disk.prefix import TOKEN
from pagein.kv.disk.tree import Node, Tree
from pagein.kv.snapshots.value import Candidate


def victims(
    tree: Tree, need: int, size: int | None, kept: Collection[Node], path: Sequence[Node], now: float
) -> list[Node] | None:
    """Return the nodes that leave for ``need`` bytes, or for one slot of ``size``; None where all have fewer.

    Never one that is ``kept``, on the ``path`` of a text or being read, nor one with something below it that stays.
    """
    if need <= 0:
        return []
    heap = [_rank(node, now) for node in tree.leaves if _may_leave(node, kept, path)]
    heapq.heapify(heap)
    chosen: list[Node] = []
    gone: dict[Node, int] = {}
    while heap:
        node = heapq.heappop(heap)[-1]
        chosen.append(node)
        for block in node.blocks.values():
            need -= block.slot.size
            if block.slot.size == size:
                need = 0
        if need <= 0:
            return chosen
        parent = node.parent
        if parent is None or parent.parent is None:
            continue
        gone[parent] = gone.get(parent, 0) + 1
        if gone[parent] == len(parent.children) and _may_leave(parent, kept, path):
            heapq.heappush(heap, _rank(parent, now))
    return None


def _may_leave(node: Node, kept: Collection[Node], path: Sequence[Node]) -> bool:
    on_path = node.index < len(path) and path[node.index] is node
    return not on_path and node not in kept and not any(block.readers for block in node.blocks.values())


def _rank(node: Node, now: float) -> tuple[float, bytes, Node]:
    known = [block.seconds for block in node.blocks.values() if block.seconds is not None]
    size = sum(block.slot.size for block in node.blocks.values())
    idle, tokens = now - node.used, len(node.tokens) // TOKEN
    one = Candidate("", size, tokens, idle, sum(known) if known else None)
    return -one.cost_of_keeping, node.key, node
