"""The content digest of weight files."""

from __future__ import annotations

import os

import pytest

from pagein.kv.snapshots import weights
from pagein.kv.snapshots.treehash import BLOCK, TreeHash, in_blocks
from pagein.kv.snapshots.weights import Cancelled, WeightDigests


@pytest.fixture
def settled(monkeypatch):
    """Every file counts as old enough to be remembered."""
    monkeypatch.setattr(weights, "SETTLED_SECONDS", -1e9)


def count_reads(monkeypatch):
    read, blocks = [], weights._blocks
    monkeypatch.setattr(weights, "_blocks", lambda path: read.append(path) or blocks(path))
    return read


def test_any_byte_counts_and_the_name_does_not(tmp_path):
    """One byte far from both ends makes another digest; another name or folder does not."""
    content = bytearray(os.urandom(3 * BLOCK))
    digests = WeightDigests(None)
    (tmp_path / "a.gguf").write_bytes(content)
    (tmp_path / "b.gguf").write_bytes(content)
    content[BLOCK + 12345] ^= 1
    (tmp_path / "c.gguf").write_bytes(content)
    a, b, c = (digests.digest([tmp_path / f"{name}.gguf"]) for name in "abc")
    assert a == b != c


def test_a_remembered_digest_costs_no_reading(tmp_path, monkeypatch, settled):
    """The second start reads nothing, until the file is touched."""
    path, memory = tmp_path / "a.gguf", tmp_path / "digests.json"
    path.write_bytes(b"one")
    read = count_reads(monkeypatch)
    first = WeightDigests(memory).digest([path])
    again = WeightDigests(memory)
    assert again.known([path])
    assert again.digest([path]) == first
    assert read == [path]
    path.write_bytes(b"two")
    assert not again.known([path])
    assert again.digest([path]) != first


def test_a_set_back_time_does_not_hide_a_change(tmp_path, settled):
    """Same name, size, inode and time of writing, other bytes: the digest is another."""
    path, digests = tmp_path / "a.gguf", WeightDigests(None)
    path.write_bytes(b"one")
    status = path.stat()
    first = digests.digest([path])
    path.write_bytes(b"two")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digests.digest([path]) != first


def test_a_file_that_was_just_written_is_not_remembered(tmp_path):
    """Its time stamps are too coarse to show the next change."""
    path, digests = tmp_path / "a.gguf", WeightDigests(None)
    path.write_bytes(b"one")
    digests.digest([path])
    assert not digests.known([path])


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"a": 1}', b'{"x": "not hex"}', b"[" * 100000])
def test_a_damaged_memory_is_an_empty_one(tmp_path, content, settled):
    """Whatever lies there, digests are computed and remembered anew."""
    path, memory = tmp_path / "a.gguf", tmp_path / "digests.json"
    path.write_bytes(b"one")
    memory.write_bytes(content)
    digest = WeightDigests(memory).digest([path])
    assert WeightDigests(memory).known([path])
    assert digest == WeightDigests(None).digest([path])


def test_hashing_can_be_given_up(tmp_path):
    """A daemon that stops need not hash 40 GB to the end."""
    path = tmp_path / "a.gguf"
    path.write_bytes(b"x" * 3 * BLOCK)
    with pytest.raises(Cancelled):
        WeightDigests(None).digest([path], cancelled=lambda: True)


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 9 * BLOCK + 5])
def test_threads_and_chunks_do_not_change_a_digest(size):
    """One thread or four, one chunk or many: the same digest, and the same bytes in blocks."""
    content = os.urandom(size)
    found = set()
    for threads, step in ((1, 1000), (4, 700_001), (3, max(size, 1))):
        chunks = [content[start : start + step] for start in range(0, size, step)]
        blocks = list(in_blocks(chunks))
        assert b"".join(blocks) == content
        assert all(len(block) == BLOCK for block in blocks[:-1])
        with TreeHash(threads) as tree:
            for block in blocks:
                tree.update(block)
            found.add(tree.digest())
    assert len(found) == 1
