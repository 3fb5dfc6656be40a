"""The page cache of a worker counts against its memory limit: blocks pass without filling it."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys

import pytest

from pagein.memory.buffers import Buffer
from tests.kv.disk.build import FULL, open_store, save, text, words

LENGTHS = (256 * 1024, 100_000)


def cached_bytes(path):
    """Bytes of a file that are in the page cache (mincore)."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    there = (ctypes.c_ubyte * pages)()
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), size) as view:
        place = ctypes.c_char.from_buffer(view)
        result = ctypes.CDLL(None).mincore(ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(size), there)
        del place
    assert result == 0
    return sum(one & 1 for one in there) * mmap.PAGESIZE


def lives_in_memory(folder):
    """Whether the disk is a memory itself (tmpfs)."""
    path = folder / "probe"
    with open(path, "wb") as file:
        file.write(b"x" * 65_536)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 65_536, os.POSIX_FADV_DONTNEED)
    return cached_bytes(path) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="mincore as Linux has it")
@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("on_pages", [True, False])
def test_neither_writes_nor_reads_leave_blocks_in_the_page_cache(tmp_path, monkeypatch, direct, on_pages):
    """After a save and after a restore nothing of the blocks is cached, whichever way the disk is used."""
    if lives_in_memory(tmp_path):
        pytest.skip("files of this disk live in the page cache")
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT", raising=False)
    store = open_store(tmp_path / "kv")
    prefix = text(words(64 * 20))
    save(store, prefix, conversation="c", lengths=LENGTHS)
    (path,) = (tmp_path / "kv").glob("*.slots")
    assert cached_bytes(path) == 0
    buffer = Buffer(512 * 1024)
    for ref in store.walk(prefix, FULL).refs["full"]:
        shift = 0 if on_pages else 64
        store.read(ref, buffer.view[shift : shift + ref.bytes])
    assert cached_bytes(path) == 0
    store.close()
