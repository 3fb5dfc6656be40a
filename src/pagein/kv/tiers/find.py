"""The longest prefix of a prompt that lies in memory, over all groups of layers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from pagein.kv.blocks.keys import BLOCK, common_length
from pagein.kv.tiers.known import Known, Node


@dataclass(frozen=True, slots=True)
class Piece:
    """One block of one group that serves a prefix."""

    index: int
    """Which block of the text."""
    node: Node
    rows: int
    """Rows of it that the prefix may use."""


@dataclass(frozen=True, slots=True)
class Held:
    """A prefix that memory holds."""

    length: int
    pieces: tuple[tuple[Piece, ...], ...]
    """By group, in the order of the text: from the first block that the group needs."""


def first_block(length: int, window: int | None) -> int:
    """Which block the next token's attention begins in: for a window of w, that of the w - 1 tokens before it."""
    return 0 if window is None else max(0, length - (window - 1)) // BLOCK


def find(
    known: Known,
    links: Sequence[tuple[bytes, tuple[int, ...]]],
    root: bytes,
    windows: Sequence[int | None],
    limit: int,
    exact: Collection[int] | None = None,
) -> Held:
    """Return the longest prefix, of at most ``limit`` tokens, all of whose blocks lie on the device or in host memory.

    ``links`` is the prompt as `keys.chain` gives it; ``exact`` are the only lengths that will do where there is side
    state (`side_lengths`).
    """
    rows = _rows(known, links, root, windows)
    runs = [_runs(one) for one in rows]
    full = min((_reach(one) for one, window in zip(rows, windows, strict=True) if window is None), default=limit)
    most = min(full, limit)
    for length in _candidates(rows, most, exact):
        if all(_serves(*one, length) for one in zip(rows, runs, windows, strict=True)):
            return Held(length, tuple(_pieces(one, length, window) for one, window in zip(rows, windows, strict=True)))
    return Held(0, tuple(() for _ in windows))


def side_lengths(known: Known, links: Sequence[tuple[bytes, tuple[int, ...]]], root: bytes) -> dict[int, Node]:
    """Return the lengths of a prompt's prefixes that side state is held for."""
    found: dict[int, Node] = {}
    parent = root
    for index, (key, tokens) in enumerate(links):
        for node in known.children(parent):
            if node.side is not None and node.tokens == tokens[: len(node.tokens)]:
                found[index * BLOCK + len(node.tokens)] = node
        parent = key
    return found


_Rows = list[tuple[Node, int] | None]


def _rows(
    known: Known, links: Sequence[tuple[bytes, tuple[int, ...]]], root: bytes, windows: Sequence[int | None]
) -> list[_Rows]:
    """By group, per block of the prompt: who holds the most of its first rows, and how many.

    Up to the first gap of a group that needs all of them: behind it nothing serves.
    """
    found: list[_Rows] = [[] for _ in windows]
    parent = root
    for key, tokens in links:
        node, gap = known.get(key), False
        own = node if node is not None and node.tokens == tokens and node.parent == parent else None
        for group, window in enumerate(windows):
            one = (own, len(tokens)) if own is not None and _lies(own, group) else None
            one = one or _nearest(known, parent, tokens, group)
            found[group].append(one)
            gap |= window is None and (one is None or one[1] < BLOCK)
        if gap:
            break
        parent = key
    return found


def _nearest(known: Known, parent: bytes, tokens: tuple[int, ...], group: int) -> tuple[Node, int] | None:
    best: tuple[Node, int] | None = None
    for node in known.children(parent):
        alike = common_length(node.tokens, tokens) if _lies(node, group) else 0
        if alike > (best[1] if best is not None else 0):
            best = (node, alike)
    return best


def _lies(node: Node, group: int) -> bool:
    return node.device[group] is not None or node.host[group] is not None


def _runs(rows: _Rows) -> list[int]:
    """Per block, and for the one behind the last: how many whole ones come right before it."""
    found = [0]
    for one in rows:
        found.append(found[-1] + 1 if one is not None and one[1] == BLOCK else 0)
    return found


def _reach(rows: _Rows) -> int:
    """Tokens without a gap from the first on."""
    total = 0
    for one in rows:
        total += one[1] if one is not None else 0
        if one is None or one[1] < BLOCK:
            break
    return total


def _candidates(rows: Sequence[_Rows], most: int, exact: Collection[int] | None) -> list[int]:
    """Lengths worth trying, the longest first."""
    if exact is not None:
        return sorted((length for length in exact if 0 < length <= most), reverse=True)
    ends = {most} if most else set()
    for index in range(-(-most // BLOCK)):
        held = [one[index] for one in rows if index < len(one)]
        least = min((one[1] for one in held if one is not None), default=0)
        ends.add(min(index * BLOCK + least, most))
        ends.update({min((index + 1) * BLOCK, most)})
    return sorted((length for length in ends if length > 0), reverse=True)


def _serves(rows: _Rows, runs: list[int], window: int | None, length: int) -> bool:
    """Tell whether all blocks are there that a group needs for a length."""
    first, last = first_block(length, window), (length - 1) // BLOCK
    if first > last:
        return True
    one = rows[last] if last < len(rows) else None
    return one is not None and one[1] >= length - last * BLOCK and runs[last] >= last - first


def _pieces(rows: _Rows, length: int, window: int | None) -> tuple[Piece, ...]:
    """The blocks that a group needs for a length that it serves."""
    found = []
    for index in range(first_block(length, window), -(-length // BLOCK)):
        one = rows[index]
        assert one is not None
        found.append(Piece(index, one[0], min(BLOCK, length - index * BLOCK)))
    return tuple(found)
