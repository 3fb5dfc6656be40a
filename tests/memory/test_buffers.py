"""Buffers: where they lie, what they cost, and what is left of them once they are closed."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from pagein.memory.buffers import Buffer

MIB = 1024 * 1024


def address(buffer):
    """Return where a buffer's first byte lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer.view))


def resident():
    """Return this process's resident bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [1, 4096, 3 * MIB, 2 * MIB + 4096])
def test_a_buffer_begins_with_a_huge_page_and_has_the_asked_size(nbytes):
    """Direct reads need pages, and huge pages need an address in multiples of 2 MiB."""
    buffer = Buffer(nbytes)
    assert address(buffer) % (2 * MIB) == 0
    assert len(buffer.view) == buffer.nbytes == nbytes
    assert not buffer.view.readonly
    assert bytes(buffer.view) == bytes(nbytes)
    buffer.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_buffer_costs_what_is_written_and_gives_it_back_at_its_end():
    """Memory is resident from the first write until `close`, not until the collector comes by."""
    begin = resident()
    buffer = Buffer(64 * MIB)
    assert resident() - begin < 8 * MIB
    view = buffer.view
    view[:] = b"x" * (64 * MIB)
    assert resident() - begin > 60 * MIB
    buffer.close()
    assert resident() - begin < 8 * MIB
    assert view[5] == 0  # and what still looks into it does not fault


def test_closing_twice_is_fine_and_a_closed_buffer_has_no_view():
    """Whoever cleans up need not know whether it was done already."""
    buffer = Buffer(4096)
    buffer.close()
    buffer.close()
    with pytest.raises(AssertionError):
        _ = buffer.view


def test_pages_that_are_given_back_are_memory_of_the_system_again():
    """Without huge pages exactly the named pages go; their neighbours stay as they are."""
    buffer = Buffer(8 * MIB, huge=False)
    buffer.view[:] = b"\x01" * (8 * MIB)
    before = resident()
    buffer.give_back(mmap.PAGESIZE, 6 * MIB)
    assert before - resident() >= 5 * MIB
    assert buffer.view[mmap.PAGESIZE - 1] == 1
    assert not any(buffer.view[mmap.PAGESIZE : mmap.PAGESIZE + 6 * MIB])
    assert buffer.view[mmap.PAGESIZE + 6 * MIB] == 1
