"""The head of a file that llama.cpp saved a request slot to: which tokens its cells belong to.

Layout (llama.cpp ``llama_state_seq_save_file``, ``server_tokens``; builds 9000 to 11549), little-endian 32 bits each::

    "ggsq"  version  n  n words  cells…

Older servers put the n token ids there. Newer ones put ``-1 1 count``, the ids, and the number of media chunks, with
the chunks behind it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from pagein.errors import SlotRefused

MAGIC = int.from_bytes(b"ggsq", "big")  # written as one number, so its bytes stand the other way round
_MARK = 0xFFFFFFFF
_MARK_VERSION = 1
MOST_WORDS = 16 * 1024**2
_HEAD = struct.Struct("<III")


@dataclass(frozen=True, slots=True)
class SlotFile:
    """What the head says."""

    version: int
    tokens: tuple[int, ...]
    has_media: bool
    """Pictures or sound stand between the tokens, and are no tokens themselves."""
    bytes: int
    """Of the whole file."""


def read_slot_file(path: Path) -> SlotFile:
    """Read the head; raises SlotRefused for what llama.cpp did not write, OSError where it cannot be read."""
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size:
            raise SlotRefused(f"the slot file has {size} bytes, its head alone has {_HEAD.size}")
        magic, version, count = _HEAD.unpack(head)
        if magic != MAGIC:
            raise SlotRefused(f"the slot file begins with {magic:#x}, not with {MAGIC:#x}")
        if count > MOST_WORDS or _HEAD.size + 4 * count > size:
            raise SlotRefused(f"the slot file names {count} tokens and has {size} bytes")
        words = struct.unpack(f"<{count}I", file.read(4 * count))
    tokens, has_media = _tokens(words)
    return SlotFile(version, tokens, has_media, size)


def _tokens(words: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
    if not words or words[0] != _MARK:
        return words, False
    if len(words) < 4 or words[1] != _MARK_VERSION or words[2] > len(words) - 4:
        raise SlotRefused(f"the slot file's list of tokens is of an unknown kind: {words[:3]}")
    count = words[2]
    return words[3 : 3 + count], words[3 + count] != 0
