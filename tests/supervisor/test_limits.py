"""Limits, their numbers and what an OOM kill means, on groups that imitate the kernel's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fake_cgroups import FakeCgroups

from pagein.supervisor.limits import LEAST_MARGIN, limit_for, outgrown, sacrificed
from pagein.supervisor.limits.cell_v1 import MemoryCell
from pagein.supervisor.limits.cell_v2 import UnifiedCell
from pagein.supervisor.limits.limiter import group_name, label

MIB = 1024**2
LIMIT = 100 * MIB


@pytest.fixture
def v2(tmp_path):
    """A v2 group that is limited."""
    files = FakeCgroups(tmp_path / "v2", 2)
    cell = UnifiedCell(files, files.at("/x/cell"))
    cell.protect(LIMIT)
    return cell


@pytest.fixture
def v1(tmp_path):
    """A v1 group that is limited."""
    files = FakeCgroups(tmp_path / "v1", 1)
    cell = MemoryCell(files, files.at("/x/cell"))
    cell.protect(LIMIT)
    return cell


def put(cell, **texts):
    """Let the kernel say something: ``memory_stat`` stands for the file ``memory.stat``."""
    for name, text in texts.items():
        (cell.directory / name.replace("_", ".", 1)).write_text(text)


@pytest.mark.parametrize(
    ("allowance", "margin", "expected"),
    [
        (1024 * MIB, 0.1, 1024 * MIB + 107_376_640),  # a tenth, up to the next page
        (100 * MIB, 0.1, 164 * MIB),
        (100 * MIB, 0, 164 * MIB),
        (100 * MIB, 200 * MIB, 300 * MIB),
        (100 * MIB, 1.0, 200 * MIB),
        (1, 0, 64 * MIB + 4096),
    ],
)
def test_a_limit_is_the_allowance_and_the_margin(allowance, margin, expected):
    """An int is bytes, a float a share; at least 64 MiB; whole pages."""
    assert limit_for(allowance, margin) == expected


@given(st.integers(0, 2**45), st.one_of(st.integers(0, 2**40), st.floats(0, 1)))
def test_a_limit_never_lies_below_what_is_promised(allowance, margin):
    """Nobody is ended within allowance and margin, and no limit is more than a page above them."""
    extra = margin if isinstance(margin, int) else allowance * margin
    limit = limit_for(allowance, margin)
    assert limit % 4096 == 0
    assert 0 <= limit - allowance - max(LEAST_MARGIN, extra) <= 2 * 4096


def test_v2_ends_the_worker_as_a_whole_and_gives_it_no_swap(v2):
    """Limit, group kill and swap are written."""
    files = {name: (v2.directory / name).read_text() for name in ("memory.max", "memory.oom.group", "memory.swap.max")}
    assert files == {"memory.max": str(LIMIT), "memory.oom.group": "1", "memory.swap.max": "0"}
    assert (v2.limit, v2.kills_together) == (LIMIT, True)


def test_v2_without_newer_files_still_limits(v2):
    """Group kill, swap and peak are not in every kernel: without them the limit stands and the peak is unknown."""
    for name in ("memory.oom.group", "memory.swap.max", "memory.peak"):
        (v2.directory / name).unlink()
    v2.protect(2 * LIMIT)
    assert (v2.limit, v2.peak()) == (2 * LIMIT, None)


def test_v1_limits_swap_with_memory_in_the_order_that_the_kernel_takes(v1):
    """The limit with swap is raised first and lowered last; the other order fails with EINVAL."""
    for limit in (50 * MIB, 150 * MIB):
        assert v1.set_limit(limit)
        assert (v1.directory / "memory.memsw.limit_in_bytes").read_text() == str(limit)
        assert v1.limit == limit
    assert (v1.directory / "memory.swappiness").read_text() == "0"
    assert not v1.kills_together


def test_v1_without_swap_accounting_still_limits(v1):
    """Kernels that do not account swap have no such file."""
    (v1.directory / "memory.memsw.limit_in_bytes").unlink()
    v1.protect(2 * LIMIT)
    assert v1.limit == 2 * LIMIT


def test_what_stays_when_caches_go(v1, v2):
    """Anonymous, shared and kernel memory count, file pages and their slabs do not, in v1 once nobody is there."""
    put(v2, memory_stat="anon 100\nfile 70\nshmem 20\nkernel 30\nslab_reclaimable 5\nsock 2\n")
    assert v2.usage() == 100 + 20 + 2 + 25
    put(v2, memory_stat="anon 100\nkernel_stack 1\npagetables 2\nslab 8\nslab_reclaimable 5\n")  # before 5.18
    assert v2.usage() == 100 + 1 + 2 + 3
    put(v1, memory_stat="rss 1\ntotal_rss 100\ntotal_cache 90\ntotal_shmem 20\n")
    (v1.directory / "memory.kmem.usage_in_bytes").write_text("30\n")
    assert v1.usage() == 120
    v1.join(4711)
    assert v1.usage() == 150


def test_a_group_that_is_gone_knows_nothing(v1, v2):
    """Unknown is None, nobody is in it, and removing it again is fine."""
    for cell in (v1, v2):
        assert cell.remove()
        assert (cell.limit, cell.oom_kills(), cell.hit_limit(), cell.peak(), cell.usage()) == (None,) * 5
        assert (cell.pids(), cell.kill()) == ([], [])
        assert not cell.set_limit(LIMIT)
        assert cell.remove()
        assert outgrown("m", cell, LIMIT) is None
        assert sacrificed("m", cell, LIMIT) is None


def test_a_limit_is_not_lowered_below_what_is_held(v2):
    """The kernel would end the worker for that; locked file pages cannot be taken from it either."""
    put(v2, memory_stat="anon 60000000\nfile 500000000\n")
    assert v2.set_limit(60 * MIB)
    put(v2, memory_stat="anon 50000000\nunevictable 20000000\n")
    assert not v2.set_limit(55 * MIB)
    assert v2.limit == 60 * MIB
    put(v2, memory_stat="anon 60000000\nunevictable 60000000\n")  # the same bytes, locked
    assert v2.set_limit(80 * MIB)


def test_groups_below_the_workers_count(v1, v2):
    """A worker may divide its group; processes and kills down there are its own, and it is removed whole."""
    for cell in (v1, v2):
        inner = cell.directory / "inner"
        cell._files.make(inner)
        (inner / "cgroup.procs").write_text("4711\n0\n")
        assert cell.pids() == [4711]
        assert not cell.remove()
        (inner / "cgroup.procs").write_text("")
    (v1.directory / "inner/memory.oom_control").write_text("oom_kill 2\n")
    assert v1.oom_kills() == 2
    assert v1.remove()
    assert v2.remove()


def test_v2_kills_through_the_group(v2):
    """The kernel ends everything in it at once; what still does not go is told, after a bounded time."""
    (v2.directory / "cgroup.kill").write_text("")
    v2.join(2**30)  # no such process, so nothing else can end it
    assert v2.kill(timeout=0.02) == [2**30]
    assert ("cgroup.kill", "1") in v2._files.written


def test_an_oom_kill_at_the_own_limit_is_outgrown(v1, v2):
    """Both versions tell it with allowance, limit and peak."""
    assert outgrown("m", v2, 36 * MIB) is None
    put(v2, memory_events="oom 3\noom_kill 2\n", memory_peak=f"{LIMIT}\n")
    put(v1, memory_oom_control="oom_kill 1\n", memory_max_usage_in_bytes=f"{LIMIT - 4096}\n")
    for cell, peak in ((v2, LIMIT), (v1, LIMIT - 4096)):
        error = outgrown("m", cell, 36 * MIB)
        sizes = {name: error.details[name] for name in ("allowance_bytes", "limit_bytes", "peak_bytes")}
        assert sizes == {"allowance_bytes": 36 * MIB, "limit_bytes": LIMIT, "peak_bytes": peak}
        assert error.details["pool"] == "ram"
        assert sacrificed("m", cell, 36 * MIB) is None


def test_an_oom_kill_for_others_is_not_held_against_the_model(v1, v2):
    """The machine or a group above ran out: the worker kept within its limit and needs no more the next time."""
    put(v2, memory_events="oom 0\noom_kill 1\n", memory_peak=f"{60 * MIB}\n")
    put(v1, memory_oom_control="oom_kill 1\n", memory_max_usage_in_bytes=f"{60 * MIB}\n")
    for cell in (v2, v1):
        assert outgrown("m", cell, 36 * MIB) is None
        error = sacrificed("m", cell, 36 * MIB)
        assert "limit of 100 MiB" in error.message
        assert "peak was 60.0 MiB" in error.message


def test_names_of_groups(tmp_path):
    """A model's name cannot leave its place or look like a kernel file; a state folder has one name, however spelt."""
    assert label("../a/memory.max") == "___a_memory_max"
    assert len(label("x" * 300)) == 40
    assert group_name(tmp_path) == group_name(tmp_path / "x" / "..")
    assert group_name(tmp_path) != group_name(tmp_path / "x")
