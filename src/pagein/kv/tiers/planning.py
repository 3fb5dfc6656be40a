"""Where each block of a prompt's prefix would come from, and whether bringing it up pays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pagein.kv.disk.answers import Found, Ref
from pagein.kv.snapshots.answers import Miss
from pagein.kv.tiers.answers import Source
from pagein.kv.tiers.below import Below
from pagein.kv.tiers.books import Books
from pagein.kv.tiers.cold import SIDE
from pagein.kv.tiers.conversation import Links
from pagein.kv.tiers.find import Piece, find, side_lengths
from pagein.kv.tiers.known import Node


class PlanStale(Exception):
    """What a plan counts on has moved since: plan again."""


@dataclass(frozen=True, slots=True)
class OnDevice:
    """A block that lies in the arena."""

    block: int
    node: Node
    """What it holds: it must still be there when the plan is carried out."""


@dataclass(frozen=True, slots=True)
class InHost:
    """A slot of host memory."""

    handle: int


Origin = OnDevice | InHost | Ref


@dataclass(frozen=True, slots=True)
class Step:
    """One block of one group."""

    index: int
    """Which block of the text."""
    rows: int
    """Rows that its origin has; at least those that the prefix uses."""
    origin: Origin
    exact: bool
    """It is the text's own block, and not another one that begins alike."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A prefix, and where its blocks are."""

    length: int
    steps: tuple[tuple[Step, ...], ...]
    """By group, in the order of the text, without a gap."""
    side: InHost | Ref | None
    found: Found | None
    """What of it the disk answered; kept from leaving while it is read."""

    @property
    def source(self) -> Source:
        """The lowest tier that it needs."""
        origins = [step.origin for steps in self.steps for step in steps]
        every = [*origins, *([self.side] if self.side is not None else [])]
        if any(isinstance(one, Ref) for one in every):
            return Source.DISK
        if any(isinstance(one, InHost) for one in every):
            return Source.HOST
        return Source.SHARED if every else Source.NONE

    @property
    def disk_bytes(self) -> int:
        """Bytes that come from the disk."""
        return sum(one.origin.bytes for steps in self.steps for one in steps if isinstance(one.origin, Ref))


class Planner:
    """Looks prefixes up in all tiers."""

    def __init__(self, books: Books, below: Below) -> None:
        self._books, self._below = books, below

    def in_memory(self, links: Links, root: bytes, limit: int) -> Plan:
        """Return the longest prefix on the device and in host memory (with the lock)."""
        books = self._books
        sides = side_lengths(books.known, links, root) if books.geometry.side_layers else None
        held = find(books.known, links, root, books.windows, limit, None if sides is None else sides.keys())
        steps = tuple(tuple(_step(piece, links, group) for piece in pieces) for group, pieces in enumerate(held.pieces))
        side = sides[held.length].side if sides and held.length else None
        return Plan(held.length, steps, None if side is None else InHost(side), None)

    def on_disk(self, links: Links, root: bytes, tokens: Sequence[int], at_least: int) -> Plan | Miss | None:
        """Return the longest prefix that the disk has, blocks that lie in memory as well taken from there."""
        if self._below.cold is None or at_least > len(tokens):
            return None
        found = self._below.cold.find(root, tokens, at_least)
        if isinstance(found, Miss):
            return found
        with self._books.lock:
            steps = tuple(
                tuple(self._nearer(links, ref, group) for ref in found.refs[one.name])
                for group, one in enumerate(self._books.geometry.groups)
            )
        return Plan(found.length, steps, found.refs[SIDE][0] if SIDE in found.refs else None, found)

    def _nearer(self, links: Links, ref: Ref, group: int) -> Step:
        key, tokens = links[ref.index]
        node = self._books.known.get(key)
        same = node is not None and node.tokens == tokens and ref.rows == len(tokens)
        if same and node is not None and (node.device[group] is not None or node.host[group] is not None):
            return Step(ref.index, len(tokens), _origin(node, group), True)
        return Step(ref.index, ref.tokens, ref, ref.key == key)


def _step(piece: Piece, links: Links, group: int) -> Step:
    exact = piece.node.key == links[piece.index][0]
    return Step(piece.index, len(piece.node.tokens), _origin(piece.node, group), exact)


def _origin(node: Node, group: int) -> OnDevice | InHost:
    block, handle = node.device[group], node.host[group]
    if block is not None:
        return OnDevice(block, node)
    assert handle is not None
    return InHost(handle)
