"""Real control groups of this machine: what the kernel does with a worker that passes its limit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from pagein.config.schema import LimitMode
from pagein.supervisor.limits import Groups, find_limiter, foresee, outgrown, sacrificed

MIB = 1024**2
LIMIT = 100 * MIB

TOUCH = """
import sys
sys.stdin.readline()
held = bytearray(int(sys.argv[1]))
for at in range(0, len(held), 4096):
    held[at] = 1
print("touched", flush=True)
sys.stdin.readline()
"""
MAP = """
import mmap, sys
sys.stdin.readline()
with open(sys.argv[1], "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as view:
    print(sum(view[at] for at in range(0, len(view), 4096)), flush=True)
    sys.stdin.readline()
"""
PARENT = f"""
import os, subprocess, sys
os.read(0, 1)
child = subprocess.Popen([sys.executable, "-S", "-c", {TOUCH!r}, sys.argv[1]], stdin=0)
print("child", child.wait(), flush=True)
os.read(0, 1)
"""


@pytest.fixture
def limiter(tmp_path):
    """What this machine offers; without groups the tests here have nothing to ask the kernel."""
    prospect = foresee()
    if not prospect.hard or "systemd" in prospect.words:  # a test run is not to be moved into another unit
        pytest.skip(prospect.words)
    found = find_limiter(LimitMode.AUTO, tmp_path)
    if not found.hard:
        pytest.skip(found.describe())
    yield found
    for cell in find_limiter(LimitMode.AUTO, tmp_path).sweep():
        cell.kill()
        cell.remove()
    found.close()


@pytest.fixture
def spawn():
    """Start programs that wait for a line; all end with the test."""
    started = []

    def make(code, *args):
        line = [sys.executable, "-S", "-c", code, *map(str, args)]
        process = subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield make
    for process in started:
        process.kill()
        process.communicate()


def go(process):
    """Let a program go on to its next line."""
    process.stdin.write("\n")
    process.stdin.flush()


def test_the_kernel_ends_what_passes_its_limit_and_nothing_else(limiter, spawn):
    """A liar hurts itself only: 300 MiB touched in a group of 100 MiB is the end of that process, not of the others."""
    liar, other = spawn(TOUCH, 300 * MIB), spawn(TOUCH, 10 * MIB)
    cell, beside = (limiter.confine("same.name", process.pid, LIMIT) for process in (liar, other))
    assert (cell.limit, cell.oom_kills(), cell.pids()) == (LIMIT, 0, [liar.pid])
    assert outgrown("m", cell, LIMIT) is None
    go(other)
    assert other.stdout.readline() == "touched\n"
    go(liar)
    assert liar.wait(30) == -9
    assert (cell.oom_kills(), cell.hit_limit(), cell.pids()) == (1, True, [])
    assert LIMIT - 2 * MIB <= cell.peak() <= LIMIT
    error = outgrown("m", cell, 36 * MIB)
    assert (error.details["limit_bytes"], error.details["peak_bytes"]) == (LIMIT, cell.peak())
    assert error.details["allowance_bytes"] == 36 * MIB
    assert "its cgroup (v" in error.message
    assert sacrificed("m", cell, 36 * MIB) is None
    assert cell.usage() < 8 * MIB
    assert cell.remove()
    assert (other.poll(), beside.oom_kills(), beside.pids()) == (None, 0, [other.pid])
    assert 10 * MIB <= beside.usage() < 20 * MIB
    assert not beside.remove()


def test_a_mapped_file_larger_than_the_limit_kills_nobody(limiter, spawn, tmp_path):
    """Weights that are read from a mapped file are cache: the kernel drops and reads them again."""
    if file_system(tmp_path) == "tmpfs":
        pytest.skip("files here are memory themselves")
    file = tmp_path / "weights"
    with file.open("wb") as weights:
        weights.truncate(300 * MIB)
    reader = spawn(MAP, file)
    cell = limiter.confine("m", reader.pid, LIMIT)
    go(reader)
    assert reader.stdout.readline() == "0\n"
    assert (cell.oom_kills(), reader.poll()) == (0, None)
    assert cell.peak() > LIMIT // 2
    assert cell.usage() < 16 * MIB
    assert outgrown("m", cell, LIMIT) is None


def test_children_are_confined_with_the_worker(limiter, spawn):
    """A grandchild takes from the same limit, and one call ends whatever is left of the group."""
    worker = spawn(PARENT, 300 * MIB)
    cell = limiter.confine("m", worker.pid, LIMIT)
    go(worker)  # for the parent, which starts its child
    go(worker)  # for the child
    if cell.kills_together:
        assert worker.wait(30) == -9
    else:  # v1: the kernel ends the largest process only
        assert worker.stdout.readline() == "child -9\n"
        assert cell.pids() == [worker.pid]
    assert cell.kill() == []
    assert worker.wait(30) == -9
    assert cell.oom_kills() >= 1
    assert cell.remove()


def test_a_limit_goes_up_and_down_but_not_below_what_is_held(limiter, spawn):
    """An allowance may grow and shrink while the worker lives; shrinking too far is refused and kills nobody."""
    worker = spawn(TOUCH, 150 * MIB)
    cell = limiter.confine("m", worker.pid, LIMIT)
    assert cell.set_limit(2 * LIMIT)
    go(worker)
    assert worker.stdout.readline() == "touched\n"
    assert not cell.set_limit(LIMIT)
    assert cell.limit == 2 * LIMIT
    assert cell.set_limit(180 * MIB)
    assert (cell.limit, cell.oom_kills(), worker.poll()) == (180 * MIB, 0, None)


def test_groups_of_a_killed_daemon_are_found_again(limiter, spawn, tmp_path):
    """The next limiter of the same state folder sees who lives there and removes what is empty; one of another none."""
    worker, gone = spawn(TOUCH, MIB), spawn(TOUCH, MIB)
    cell, empty = (limiter.confine("m", process.pid, LIMIT) for process in (worker, gone))
    gone.kill()
    gone.wait()
    other = find_limiter(LimitMode.AUTO, tmp_path / "other")
    assert other.sweep() == []
    other.close()
    assert empty.directory.exists()
    left = find_limiter(LimitMode.AUTO, tmp_path).sweep()
    assert [(found.directory, found.pids(), found.limit) for found in left] == [(cell.directory, [worker.pid], LIMIT)]
    assert not empty.directory.exists()
    assert left[0].kill() == []
    assert worker.wait(30) == -9
    assert left[0].remove()


def test_nothing_is_left_behind(limiter):
    """Closing removes the parent group, and may be repeated."""
    assert isinstance(limiter, Groups)
    parent = limiter._parent
    assert parent.is_dir()
    limiter.close()
    limiter.close()
    assert not parent.exists()


def test_a_process_that_is_gone_gets_no_group(limiter, spawn):
    """Its start fails by itself; the group that was made for it goes."""
    process = spawn("pass")
    process.wait()
    assert limiter.confine("m", process.pid, LIMIT) is None
    assert list(limiter._files.children(limiter._parent)) == []


def file_system(path: Path) -> str:
    """The type of the file system that holds a path."""
    mounts = [part for part in psutil.disk_partitions(all=True) if path.is_relative_to(part.mountpoint)]
    return max(mounts, key=lambda part: len(part.mountpoint)).fstype
