"""macOS from the texts of its commands."""

import struct

import pytest

from pagein.errors import PageinError
from pagein.memory.probes import darwin

GIB, MIB = 1024**3, 1024**2


def snapshot(fixtures, name):
    """The machine of two captured texts."""
    return darwin.snapshot_from(
        (fixtures / f"darwin/{name}_sysctl.txt").read_text(), (fixtures / f"darwin/{name}_vm_stat.txt").read_text()
    )


def test_apple_silicon_is_unified(fixtures):
    """One pool for CPU and GPU; file cache, free and purgeable pages are available."""
    machine = snapshot(fixtures, "m3")
    assert machine.unified
    assert set(machine.pools) == {"ram"}
    assert machine.pools["ram"].total == 36 * GIB
    assert machine.pools["ram"].available == (52417 + 601223 + 12011) * 16384
    assert (machine.swap_total, machine.swap_used) == (2048 * MIB, int(1034.25 * MIB))
    assert machine.pressure.word == "warn"
    assert (machine.swapped_in, machine.swapped_out) == (10240 * 16384, 20480 * 16384)


def test_an_intel_mac_is_not_unified(fixtures):
    """Without the arm64 key the GPU is another matter, and pages are of 4 KiB."""
    machine = snapshot(fixtures, "intel")
    assert not machine.unified
    assert machine.pools["ram"].available == (102417 + 801223 + 2011) * 4096
    assert (machine.swap_total, machine.pressure.word) == (0, "normal")


def test_missing_answers_are_unknown():
    """Only the memory size is needed; all else may be missing."""
    machine = darwin.snapshot_from("hw.memsize: 1024\n", "")
    assert machine.pools["ram"].available is None
    assert (machine.swap_total, machine.swap_used, machine.swapped_in) == (None, None, None)
    assert machine.pressure.word is None


def test_no_memory_size_is_an_error():
    """Without a total there is nothing to budget."""
    with pytest.raises(PageinError, match=r"hw\.memsize"):
        darwin.snapshot_from("", "")


def test_one_missing_counter_makes_available_unknown():
    """A sum with a part missing would be told too small."""
    assert darwin.available_bytes({"Pages free": 1, "File-backed pages": 2}) is None


def test_footprints_stand_where_the_header_puts_them():
    """rusage_info_v4: 16 bytes of UUID, then 64-bit fields; footprint is the 8th, its lifetime maximum the 29th."""
    fields = [0] * 35
    fields[7], fields[28] = 111, 222
    buffer = bytes(16) + struct.pack("=35Q", *fields) + bytes(100)
    assert darwin.parse_rusage(buffer) == (111, 222)


def test_the_peak_is_never_below_the_footprint():
    """A kernel that keeps no lifetime maximum (0) leaves the present as peak."""
    fields = [0] * 35
    fields[7] = 111
    assert darwin.parse_rusage(bytes(16) + struct.pack("=35Q", *fields)) == (111, 111)
