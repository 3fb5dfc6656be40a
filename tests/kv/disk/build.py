"""Small texts, payloads and stores for the tests of `pagein.kv.disk`."""

from __future__ import annotations

import os
import random
from pathlib import Path

from pagein.kv.blocks.keys import ROOT_FIELDS, root_key
from pagein.kv.disk import BlockStore, Kept, Policy, Prefix

GROUPS = {"full": Policy.every(), "sliding": Policy.sliding(100), "side": Policy.exact()}
FULL = {"full": Policy.every()}
LENGTHS = (20_000, 8192)
SLOT = 28_672
SLACK = 64 * 1024
"""Bytes of the disk that a file system may take for its own account of some files: extents, the folder."""


class Clock:
    """A clock that stands still."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def root(**fields):
    """A root key; other fields, another root."""
    return root_key({**dict.fromkeys(ROOT_FIELDS, ""), **fields})


def text(tokens, tenant="", **fields):
    """A text of a tenant."""
    return Prefix.of(root(tenant=tenant, **fields), tokens, tenant=tenant, model="m")


def words(count, seed=0):
    """So many tokens."""
    return random.Random(seed).choices(range(50_000), k=count)


def payload(prefix, index, group, lengths=LENGTHS):
    """Pieces that tell which block they are."""
    name = prefix.links[index].key + group.encode()
    return [random.Random(name + bytes([at])).randbytes(length) for at, length in enumerate(lengths)]


def save(store, prefix, groups=FULL, conversation=None, lengths=LENGTHS, seconds=None):
    """Put what is missing of a text and note the turn; all of it must be kept."""
    for index, group in store.missing(prefix, groups):
        pieces = payload(prefix, index, group, lengths)
        done = store.put(prefix, index, group, groups[group], pieces, seconds=seconds)
        assert isinstance(done, Kept), done
    if conversation is not None:
        store.note_turn(conversation, prefix)


def content(store, ref):
    """All bytes of a block."""
    into = bytearray(ref.bytes)
    store.read(ref, into)
    return bytes(into)


def check_found(store, prefix, found, lengths=LENGTHS):
    """Whatever was found is what was put for the block of the text that has these rows."""
    for group, refs in found.refs.items():
        for ref in refs:
            if ref.key == prefix.links[ref.index].key:
                assert content(store, ref) == b"".join(payload(prefix, ref.index, group, lengths))


def open_store(folder, clock=None, cap=64 * 1024**2, floor=0):
    """A store with a clock that stands still."""
    return BlockStore.open(folder, cap=cap, floor=floor, clock=clock or Clock())


def disk_bytes(folder):
    """What `du -B1` says of the files in a folder."""
    return sum(os.lstat(path).st_blocks * 512 for path in Path(folder).rglob("*") if path.is_file())


def check_account(store, folder):
    """The store's account is that of the disk."""
    said, real = store.usage().bytes, disk_bytes(folder)
    assert abs(said - real) <= SLACK, (said, real)
