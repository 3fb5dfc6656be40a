"""/proc/meminfo, /proc/vmstat and PSI."""

import os

import psutil
import pytest

from pagein.memory.probes import linux
from pagein.memory.snapshot import Pressure

GIB = 1024**3


def test_host_memory_of_a_captured_machine(fixtures):
    """Total, available and swap come in bytes, swap use as total less free."""
    host = linux.read_host(fixtures / "cgroup/v2_nested")
    assert (host.total, host.available) == (32 * GIB, 20 * GIB)
    assert (host.swap_total, host.swap_used) == (8 * GIB, 1 * GIB)
    assert host.swapped_in == 2560 * os.sysconf("SC_PAGE_SIZE")
    assert not host.wsl


def test_wsl_is_told_by_its_kernel(fixtures):
    """A Microsoft kernel means a virtual machine on Windows."""
    assert linux.read_host(fixtures / "proc/wsl2").wsl


def test_what_an_old_kernel_does_not_say_is_unknown(fixtures):
    """Without MemAvailable (kernels before 3.14) nothing is made up from MemFree; without vmstat no swap-ins."""
    host = linux.read_host(fixtures / "proc/old_kernel")
    assert (host.total, host.available, host.swapped_in) == (4 * GIB, None, None)


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


def test_no_pressure_file_is_unknown(tmp_path):
    """Where PSI is off nothing is known."""
    assert linux.read_pressure(tmp_path / "memory") == Pressure()


@pytest.mark.skipif(not os.path.exists("/proc/meminfo"), reason="Linux only")
def test_this_machine_agrees_with_psutil():
    """On the real machine the total is psutil's."""
    assert linux.read_host().total == psutil.virtual_memory().total
