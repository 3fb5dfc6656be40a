"""Names of blocks by what is in them: a chain of hashes over what computed them and the tokens that they stand for.

A key names a block and all before it. Whoever finds one compares the tokens, too: two that collide are a miss.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence

BLOCK = 64
"""Tokens of a block."""
KEY_BYTES = 32
_ROOT = b"pagein kv root 1\n"
_NEXT = b"pagein kv block 1\n"
ROOT_FIELDS = frozenset({"weights", "dtype", "geometry", "rope", "adapter", "tenant", "media"})
"""What a root must name; "" where there is nothing to tell apart (no adapter, no media, one tenant).

weights: digest of their content · dtype: of the KV · geometry: what `Geometry.text` says, side layers included ·
adapter: digest and strength · media: digest of the images and sounds that the tokens stand for.
"""


def root_key(fingerprint: Mapping[str, str]) -> bytes:
    """Return what stands before the first block: 32 bytes that differ where a field does, whatever its text.

    Every field of `ROOT_FIELDS` must be there, so that none is forgotten; further ones count as well (engine build).
    """
    missing = ROOT_FIELDS - fingerprint.keys()
    if missing:
        raise ValueError(f"a root key needs {', '.join(sorted(missing))}, too")
    digest = hashlib.sha256(_ROOT)
    for name in sorted(fingerprint):
        for text in (name.encode(), fingerprint[name].encode()):
            digest.update(struct.pack("<Q", len(text)))
            digest.update(text)
    return digest.digest()


def next_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Return the key of the block that follows one (or a root) with 1 to 64 tokens."""
    assert len(parent) == KEY_BYTES, len(parent)
    assert 0 < len(tokens) <= BLOCK, len(tokens)
    return hashlib.sha256(_NEXT + parent + struct.pack(f"<I{len(tokens)}q", len(tokens), *tokens)).digest()


def chain(root: bytes, tokens: Sequence[int]) -> list[tuple[bytes, tuple[int, ...]]]:
    """Return key and tokens of each block of a text, the last one maybe of fewer than 64."""
    found: list[tuple[bytes, tuple[int, ...]]] = []
    key = root
    for at in range(0, len(tokens), BLOCK):
        piece = tuple(tokens[at : at + BLOCK])
        key = next_key(key, piece)
        found.append((key, piece))
    return found


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that two texts begin with alike."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])
