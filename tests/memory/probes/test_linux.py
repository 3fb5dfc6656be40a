"""/proc/meminfo, /proc/vmstat and PSI."""

import os

import psutil
import pytest

from pagein.memory.probes import linux
from pagein.memory.snapshot import Pressure

GIB, MIB = 1024**3, 1024**2


def test_host_memory_of_a_captured_machine(fixtures):
    """Total, available and swap come in bytes, swap use as total less free."""
    host = linux.read_host(fixtures / "cgroup/v2_nested")
    assert (host.total, host.available) == (32 * GIB, 20 * GIB)
    assert (host.swap_total, host.swap_used) == (8 * GIB, 1 * GIB)
    assert host.swapped_in == 2560 * os.sysconf("SC_PAGE_SIZE")
    assert host.swapped_out == 8192 * os.sysconf("SC_PAGE_SIZE")
    assert not host.wsl


def test_wsl_is_told_by_its_kernel(fixtures):
    """A Microsoft kernel means a virtual machine on Windows."""
    assert linux.read_host(fixtures / "proc/wsl2").wsl


def test_what_an_old_kernel_does_not_say_is_unknown(fixtures):
    """Without MemAvailable (kernels before 3.14) nothing is made up from MemFree; without vmstat no swap-ins."""
    host = linux.read_host(fixtures / "proc/old_kernel")
    assert (host.total, host.available) == (4 * GIB, None)
    assert (host.swapped_in, host.swapped_out) == (None, None)


def test_nothing_there_is_all_unknown(tmp_path):
    """An empty tree gives no zeros."""
    assert linux.read_host(tmp_path) == linux.HostMemory(None, None, None, None, None)


def test_meminfo_skips_what_is_no_size():
    """Counts without a unit are not bytes."""
    assert linux.parse_meminfo("MemTotal: 2 kB\nHugePages_Total:       5\nodd\n") == {"MemTotal": 2048}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("some avg10=1.53 avg60=0.1 avg300=0.0 total=5\nfull avg10=0.25 avg60=0.1 avg300=0.0 total=2\n", (1.53, 0.25)),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", (0.0, None)),
        ("", (None, None)),
        ("some avg10=x\n\nnoise\n", (None, None)),
    ],
)
def test_pressure_text(text, expected):
    """Missing lines are unknown; zero is zero."""
    assert linux.parse_pressure(text) == Pressure(*expected)


def test_free_memory_by_the_size_of_its_blocks(fixtures):
    """Each column counts blocks twice as large as the one before it; all zones add up."""
    text = "Node 0, zone   Normal      5      0      1\nNode 1, zone   Normal      0      0      2\n"
    blocks = linux.parse_buddyinfo(text, block=16384, page=4096)
    assert blocks == linux.FreeBlocks(free=5 * 4096 + 3 * 16384, large=3 * 16384)
    assert blocks.scattered == pytest.approx(20 / 68)
    captured = linux.parse_buddyinfo((fixtures / "cgroup/hybrid/proc/buddyinfo").read_text(), 2 * MIB, 4096)
    assert captured == linux.FreeBlocks(free=21533954048, large=18113101824)


@pytest.mark.parametrize("text", ["", "noise\n", "Node 0, zone DMA\n", "Node 0, zone DMA 1 x\n"])
def test_free_memory_that_cannot_be_read_is_unknown(text):
    """Odd lines are left out, and without any there is no figure."""
    assert linux.parse_buddyinfo(text, 2 * MIB, 4096) is None


def test_swap_areas_have_their_sizes():
    """Files and partitions, in bytes; the heading and odd lines are none."""
    text = "Filename Type Size Used Priority\n/dev/zram0 partition 1024 0 100\n/swap\\040file file 8 0 -2\nodd\n"
    assert linux.parse_swaps(text) == {"/dev/zram0": MIB, "/swap\\040file": 8192}
    assert linux.parse_swaps("Filename Type Size Used Priority\n") == {}


def test_no_pressure_file_is_unknown(tmp_path):
    """Where PSI is off nothing is known."""
    assert linux.read_pressure(tmp_path / "memory") == Pressure()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="Linux only")
def test_this_machine_agrees_with_psutil():
    """On the real machine the total is psutil's."""
    assert linux.read_host().total == psutil.virtual_memory().total
