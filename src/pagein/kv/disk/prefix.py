"""A text as the store knows it: a chain of keys, each with its tokens, so that neither is computed twice."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from pagein.kv.blocks import keys

if TYPE_CHECKING:
    from pagein.kv.disk.tree import Node

TOKEN = 8
"""Bytes of a packed token: i64, as in the keys."""


@dataclass(frozen=True, slots=True)
class Link:
    """One block of a text."""

    key: bytes
    tokens: bytes
    """Packed, little-endian."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """The blocks of a text from its beginning; only the last one may have fewer than `keys.BLOCK` tokens."""

    root: bytes
    tenant: str
    model: str
    """What the model is called, for people; what it is stands in the root."""
    links: tuple[Link, ...]
    length: int
    trail: list[Node] = field(default_factory=list, compare=False, repr=False)
    """Nodes that were proven to be this text's: `Tree.path` looks at each but once, however often it is asked."""

    @classmethod
    def of(cls, root: bytes, tokens: Sequence[int], *, tenant: str = "", model: str = "") -> Self:
        """Compute the keys of a text."""
        links = tuple(Link(key, pack(piece)) for key, piece in keys.chain(root, tokens))
        return cls(root, tenant, model, links, len(tokens))


def pack(tokens: Sequence[int]) -> bytes:
    """Tokens as bytes; they differ where the tokens do."""
    return struct.pack(f"<{len(tokens)}q", *tokens)


def common(one: bytes, other: bytes) -> int:
    """Tokens that two packed texts begin with alike."""
    most = min(len(one), len(other)) // TOKEN
    if one[: most * TOKEN] == other[: most * TOKEN]:
        return most
    return next(at for at in range(most) if one[at * TOKEN : (at + 1) * TOKEN] != other[at * TOKEN : (at + 1) * TOKEN])
