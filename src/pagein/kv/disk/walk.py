"""The longest prefix of a text that every group of layers can serve (pure)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagein.kv.blocks.keys import BLOCK
from pagein.kv.disk.answers import Found, Kind, Policy, Ref
from pagein.kv.disk.prefix import TOKEN, Prefix, common
from pagein.kv.disk.tree import Node, Tree


def walk(tree: Tree, prefix: Prefix, groups: Mapping[str, Policy]) -> Found | None:
    """Return what serves the text for longest; None where nothing does.

    Rows of a token depend on no later one, so that a block serves as far as its tokens begin as the text's do.
    """
    # Who sees only itself needs nothing of what was before.
    asked = {group: policy for group, policy in groups.items() if policy.kind is not Kind.SLIDING or policy.window > 1}
    found = _Walk(tree, prefix, asked).found()
    return found and Found(found.length, {group: found.refs.get(group, ()) for group in groups})


def missing(tree: Tree, prefix: Prefix, groups: Mapping[str, Policy]) -> list[tuple[int, str]]:
    """Return block and group of what is not there of a text that goes on exactly at its end."""
    path, count = tree.path(prefix), len(prefix.links)
    wanted = []
    for group, policy in groups.items():
        first = policy.first_token(prefix.length)
        begin = count - 1 if policy.kind is Kind.EXACT else first // BLOCK
        if first < prefix.length:
            wanted += [(at, group) for at in range(begin, count) if at >= len(path) or group not in path[at].blocks]
    return sorted(wanted)


class _Walk:
    """One question. A length is a block of the text and rows of it; the longest is tried first."""

    def __init__(self, tree: Tree, prefix: Prefix, groups: Mapping[str, Policy]) -> None:
        self._prefix = prefix
        self._groups = groups
        self._path = tree.path(prefix)
        self._root = tree.nodes.get(prefix.root)
        self._known: dict[tuple[str, int], tuple[int, Node] | None] = {}
        self._runs = {group: self._run(group) for group, one in groups.items() if one.kind is not Kind.EXACT}

    def found(self) -> Found | None:
        for last in range(self._furthest(), -1, -1):
            for rows in self._lengths(last):
                if all(self._serves(group, last, rows) for group in self._groups):
                    refs = {group: tuple(self._refs(group, last, rows)) for group in self._groups}
                    return Found(last * BLOCK + rows, refs)
        return None

    def _furthest(self) -> int:
        """The last block of the text that might be used; -1 where none might."""
        last = min(len(self._path), len(self._prefix.links) - 1)
        if last < 0 or self._root is None or self._root.parent is not None:
            return -1
        for group, policy in self._groups.items():
            if policy.kind is Kind.EVERY:
                last = next((at for at in range(last) if not self._whole(group, at)), last)
        return last

    def _lengths(self, last: int) -> Iterator[int]:
        """Rows of a block of the text that might be used, the most first."""
        exact = [group for group, policy in self._groups.items() if policy.kind is Kind.EXACT]
        if exact:
            lengths = {len(node.tokens) // TOKEN for node in self._exact(last, exact)}
            yield from sorted(lengths, reverse=True)
            return
        # More rows need no more of what is before them, so that fewer are not worth another look.
        best = [self._best(group, last) for group in self._groups]
        rows = min((one[0] if one is not None else 0 for one in best), default=0)
        if rows:
            yield rows

    def _serves(self, group: str, last: int, rows: int) -> bool:
        policy = self._groups[group]
        if policy.kind is Kind.EXACT:
            return True  # `_lengths` has asked
        first = policy.first_token(last * BLOCK + rows) // BLOCK
        best = self._best(group, last)
        return best is not None and best[0] >= rows and self._runs[group][last] >= last - first

    def _refs(self, group: str, last: int, rows: int) -> Iterator[Ref]:
        policy = self._groups[group]
        if policy.kind is Kind.EXACT:
            node = next(one for one in self._exact(last, [group]) if len(one.tokens) == rows * TOKEN)
            yield node.ref(group, last, rows)
            return
        first = policy.first_token(last * BLOCK + rows) // BLOCK
        for at in range(first, last):
            yield self._path[at].ref(group, at, BLOCK)
        best = self._best(group, last)
        assert best is not None
        yield best[1].ref(group, last, rows)

    def _run(self, group: str) -> list[int]:
        """Per block of the text, as far as it is known: how many that the group has come right before it."""
        found = [0]
        for node in self._path:
            found.append(found[-1] + 1 if group in node.blocks else 0)
        return found

    def _whole(self, group: str, at: int) -> bool:
        return at < len(self._path) and group in self._path[at].blocks

    def _best(self, group: str, at: int) -> tuple[int, Node] | None:
        """Rows that a group has of a block of the text, and the node that has them."""
        place = (group, at)
        if place not in self._known:
            self._known[place] = self._look(group, at)
        return self._known[place]

    def _look(self, group: str, at: int) -> tuple[int, Node] | None:
        if self._whole(group, at):
            node = self._path[at]
            return len(node.tokens) // TOKEN, node
        tokens = self._prefix.links[at].tokens
        found: tuple[int, Node] | None = None
        for node in self._beside(at):
            if group in node.blocks and node.tokens[:TOKEN] == tokens[:TOKEN]:
                rows = common(node.tokens, tokens)
                if found is None or rows > found[0]:
                    found = rows, node
        return found

    def _exact(self, at: int, groups: list[str]) -> Iterator[Node]:
        tokens = self._prefix.links[at].tokens
        for node in self._beside(at):
            if all(group in node.blocks for group in groups) and tokens.startswith(node.tokens):
                yield node

    def _beside(self, at: int) -> Iterator[Node]:
        """All nodes that stand for this block of the text or begin another way on from there."""
        parent = self._path[at - 1] if at else self._root
        assert parent is not None
        yield from parent.children.values()
