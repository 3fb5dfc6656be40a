"""One snapshot: the smallest total and, separately, the smallest available."""

import os
from pathlib import Path, PurePath

import pytest

from pagein.errors import PageinError
from pagein.memory.probes import host, linux, nvidia
from pagein.memory.probes.cgroup import Level, Limit
from pagein.memory.snapshot import PoolReading, Pressure

GIB, MIB = 1024**3, 1024**2
PAGE = os.sysconf("SC_PAGE_SIZE")
HOST = linux.HostMemory(total=16 * GIB, available=9 * GIB, swap_total=0, swap_used=0, swapped_in=0)


def level(path: str, limit: int | None, usage: int | None) -> Level:
    """A group with one limit, and no cache."""
    limits = () if limit is None else (Limit("memory.max", limit),)
    return Level(path, 2, Path("/nowhere"), limits, usage, reclaimable=0)


def ram(*levels: Level, machine: linux.HostMemory = HOST) -> PoolReading:
    """The RAM pool of a machine with these groups."""
    return host.combine(machine, levels, [], Pressure()).pools["ram"]


def test_without_limits_physical_memory_counts():
    """No cgroup, or only unlimited ones: the kernel's own figures."""
    assert ram(level("/a", None, 3 * GIB)) == PoolReading("ram", 16 * GIB, 9 * GIB, "physical memory")


def test_total_and_available_may_come_from_different_levels():
    """The inner group has the tighter limit, the outer one the less room."""
    reading = ram(level("/a/b", 4 * GIB, 1 * GIB), level("/a", 8 * GIB, 7 * GIB))
    assert reading == PoolReading("ram", 4 * GIB, 1 * GIB, "cgroup /a/b memory.max")


def test_the_machine_may_have_less_room_than_the_cgroup():
    """Others on the machine count too."""
    assert ram(level("/a", 12 * GIB, 0)).available == 9 * GIB


def test_a_limit_above_physical_memory_is_none():
    """Such a limit never binds, and does not name itself as the source."""
    assert ram(level("/a", 64 * GIB, 0)).source == "physical memory"


def test_one_unknown_makes_available_unknown():
    """The smallest of numbers with one missing is not known."""
    assert ram(level("/a", 12 * GIB, None)).available is None
    no_available = linux.HostMemory(16 * GIB, None, None, None, None)
    assert ram(level("/a", 12 * GIB, 0), machine=no_available).available is None


def test_no_total_is_an_error():
    """A machine without a known size cannot be budgeted."""
    with pytest.raises(PageinError, match="MemTotal"):
        host.combine(linux.HostMemory(None, None, None, None, None), [], [], Pressure())


def test_discrete_gpus_are_pools(replay):
    """A card with a size has a pool; a lost one has none; the machine is not unified."""
    snapshot = host.combine(HOST, [], nvidia.read_devices(replay("lost")), Pressure())
    assert set(snapshot.pools) == {"ram", "cuda:1"}
    assert snapshot.pools["cuda:1"] == PoolReading("cuda:1", 24152899584, 23000000000, "NVIDIA L4")
    assert not snapshot.unified


def test_an_integrated_gpu_is_no_pool(replay):
    """Unified memory is one pool, not two."""
    snapshot = host.combine(HOST, [], nvidia.read_devices(replay("gb10")), Pressure())
    assert set(snapshot.pools) == {"ram"}
    assert snapshot.unified


@pytest.mark.parametrize(
    ("case", "total", "available", "source"),
    [
        # The throttle of the middle slice sets the total, the outer slice has the least room.
        ("cgroup/v2_nested", 8 * GIB, 3 * GIB + 512 * MIB, "cgroup /ai.slice/ai-models.slice memory.high"),
        ("cgroup/v2_container", 4 * GIB, GIB + (1792 + 128 - 64 + 32) * MIB, "cgroup / memory.max"),
        ("cgroup/v2_unlimited", 16 * GIB, 9 * GIB, "physical memory"),
        (
            "cgroup/v1_nested",
            6 * GIB,
            3 * GIB + 512 * MIB,
            "cgroup /kubepods/burstable/pod7d1f0c52 memory.limit_in_bytes",
        ),
        (
            "cgroup/v1_container",
            3 * GIB,
            GIB + 768 * MIB,
            "cgroup /docker/3f9a memory.stat hierarchical_memory_limit",
        ),
        ("cgroup/hybrid", 24683652 * 1024, None, "physical memory"),
        ("proc/wsl2", 8 * GIB, 6 * GIB, "memory of the WSL2 virtual machine"),
    ],
)
def test_captured_machines(fixtures, case, total, available, source):
    """Whole trees, read as if they were this machine."""
    reading = host.read_machine(fixtures / case).pools["ram"]
    assert (reading.total, reading.source) == (total, source)
    if available is not None:
        assert reading.available == available


def test_stalls_are_those_of_the_group_that_limits_us(fixtures):
    """Where a v2 cgroup sets the total its own PSI counts; v1 has none, so there the whole machine's counts."""
    assert host.read_machine(fixtures / "cgroup/v2_nested").pressure == Pressure(3.21, 1.05)
    assert host.read_machine(fixtures / "cgroup/v1_nested").pressure == Pressure(0.0, 0.0)


def test_traffic_to_and_from_swap_is_in_the_snapshot(fixtures):
    """Both counters of the kernel, in bytes since boot."""
    machine = host.read_machine(fixtures / "cgroup/v2_nested")
    assert (machine.swapped_in, machine.swapped_out) == (2560 * PAGE, 8192 * PAGE)


def test_this_machine():
    """On the real machine there is a RAM pool, and no more available than there is."""
    reading = host.read_machine().pools["ram"]
    assert reading.total > 0
    assert reading.available is None or 0 < reading.available <= reading.total


@pytest.mark.parametrize("case", ["cgroup/v1_nested", "cgroup/v2_nested", "cgroup/v2_container"])
def test_readings_after_the_first_make_no_paths(fixtures, monkeypatch, case):
    """Each new path would leave slots in Python's table of interned strings, and a daemon reads twice a second."""
    root, made = fixtures / case, []
    first = host.read_machine(root)
    joined = PurePath.__truediv__
    monkeypatch.setattr(PurePath, "__truediv__", lambda path, key: made.append(key) or joined(path, key))
    assert host.read_machine(root) == first
    assert made == []
