"""From the catalogue and the folder to the tree: what does not fit together is dropped, bytes are recounted."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.disk.answers import Kind, Policy
from pagein.kv.disk.catalogue import Catalogue
from pagein.kv.disk.changes import Changes, Row
from pagein.kv.disk.digest import DIGEST
from pagein.kv.disk.layout import slot_bytes
from pagein.kv.disk.prefix import TOKEN
from pagein.kv.disk.segments import Segments, Slot
from pagein.kv.disk.tree import Block, Holder, Node, Tree

log = logging.getLogger(__name__)


def load(catalogue: Catalogue, segments: Segments) -> Tree:
    """Build the tree of what lies on the disk whole; `changes` has what is to be removed from the catalogue."""
    tree = Tree()
    for key, tenant, model in catalogue.rows("roots"):
        tree.add_root(_bytes(key), str(tenant), str(model))
    lost = _add_nodes(tree, catalogue.rows("nodes"), catalogue.used())
    strays = [row for row in catalogue.rows("blocks") if not _add_block(tree, row)]
    ended = [row for row in catalogue.rows("turns") if not _add_turn(tree, row)]
    for turns in tree.turns.values():
        for node, at in sorted(turns.items(), key=lambda turn: turn[1]):
            turns[node] = turns.pop(node, at)
    tree.changes = Changes(
        nodes={(key,): None for key in lost},
        blocks={row[:2]: None for row in strays},
        turns={row[:3]: None for row in ended},
    )
    _drop_unheld(tree)
    _drop_absent(tree, segments)
    return tree


def _add_nodes(tree: Tree, rows: list[Row], used: dict[bytes, float]) -> list[bytes]:
    """Add nodes below those that they follow; return the keys of those that follow nothing."""
    following: dict[bytes, list[tuple[bytes, bytes]]] = {}
    for key, parent, tokens in rows:
        following.setdefault(_bytes(parent), []).append((_bytes(key), _bytes(tokens)))
    waiting = list(tree.nodes.values())
    while waiting:
        node = waiting.pop()
        for key, tokens in following.get(node.key, ()):
            if 0 < len(tokens) <= BLOCK * TOKEN and node.end % BLOCK == 0 and key not in tree.nodes:
                waiting.append(tree.add(key, node, tokens, used.get(key, 0.0)))
    return [key for others in following.values() for key, _ in others if key not in tree.nodes]


def _add_block(tree: Tree, row: Row) -> bool:
    key, group, kind, window, form, lengths, digests, size, segment, slot, seconds = row
    node = tree.nodes.get(_bytes(key))
    pieces = tuple(int(length) for length in str(lengths).split(","))
    whole = slot_bytes(pieces) == size and len(_bytes(digests)) == DIGEST * len(pieces)
    if node is None or node.parent is None or not whole or group in node.blocks:
        return False
    place = Slot(_int(size), _int(segment), _int(slot))
    policy = Policy(Kind(_int(kind)), _int(window))
    cost = seconds if isinstance(seconds, float) else None
    tree.attach(node, Block(str(group), policy, str(form), pieces, _bytes(digests), place, cost))
    return True


def _add_turn(tree: Tree, row: Row) -> bool:
    tenant, conversation, key, at = row
    node = tree.nodes.get(_bytes(key))
    if node is None or node.parent is None or not isinstance(at, float):
        return False
    holder = Holder(str(tenant), str(conversation))
    tree.turns.setdefault(holder, {})[node] = at
    tree.tails.setdefault(node, set()).add(holder)
    for held in node.up():
        held.holds += 1
        held.used = max(held.used, at)  # a killed process did not write when it used them
    return True


def _drop_absent(tree: Tree, segments: Segments) -> None:
    """Recount the files, and drop blocks that are not in them, and nodes that have nothing left."""
    places = {block.slot: (node, group) for node in tree.nodes.values() for group, block in node.blocks.items()}
    absent = segments.recount(places)
    if absent:
        log.warning("%d KV blocks of the catalogue are not on the disk and were dropped", len(absent))
    for slot in absent:
        tree.detach(*places[slot])
    for node in list(tree.leaves):
        if node in tree.leaves:
            tree.prune(node)
    for root in [node for node in tree.nodes.values() if node.parent is None]:
        tree.prune(root)


def _drop_unheld(tree: Tree) -> None:
    """Drop what a turn wrote that never ended: nobody could ask to forget it."""
    tops = [node for node in _below_roots(tree.nodes.values()) if not node.holds]
    for top in tops:
        tree.clear(top)


def _below_roots(nodes: Iterable[Node]) -> list[Node]:
    """Nodes of which the one before is held, or a root."""
    return [node for node in nodes if node.parent is not None and (node.parent.parent is None or node.parent.holds)]


def _bytes(value: object) -> bytes:
    assert isinstance(value, bytes), value  # the row's seal held
    return value


def _int(value: object) -> int:
    assert isinstance(value, int), value
    return value
