"""Trees of processes: who belongs to one, and what they take together."""

import os
import subprocess
import sys

import psutil
import pytest

from pagein.memory.probes import nvidia, process
from pagein.memory.probes.process import ProcessReading, TreeSampler

KIB, MIB = 1024, 1024**2
linux_only = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")

HOLDER = """
import os, subprocess, sys
held = bytearray(int(sys.argv[1]))
for at in range(0, len(held), 4096):
    held[at] = 1
below = None
if len(sys.argv) > 2:
    below = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[2]], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, start_new_session=True)
    below.stdout.readline()
print("ready", below.pid if below else "", flush=True)
for line in sys.stdin:
    command = line.split()
    if command[0] == "grow":
        more = bytearray(int(command[1]))
        for at in range(0, len(more), 4096):
            more[at] = 1
    elif command[0] == "shrink":
        held = more = None
    print("done", flush=True)
if below:
    below.stdin.close()
    below.wait()
"""


class Holder:
    """A process that holds memory and tells when it does; its child in another session holds ``below``."""

    def __init__(self, size: int, below: int | None = None) -> None:
        more = [] if below is None else [str(below), HOLDER]
        self.child = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(size), *more],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.child.pid
        words = self.child.stdout.readline().split()
        assert words[0] == "ready"
        self.below = int(words[1]) if len(words) > 1 else None

    def tell(self, command: str) -> None:
        self.child.stdin.write(command + "\n")
        self.child.stdin.flush()
        assert self.child.stdout.readline() == "done\n"

    def end(self) -> None:
        self.child.stdin.close()
        self.child.wait()
        self.child.stdout.close()


@pytest.fixture
def hold():
    """A function that starts holders; all of them end with the test."""
    holders = []

    def start(size: int, below: int | None = None) -> Holder:
        holders.append(Holder(size, below))
        return holders[-1]

    yield start
    for holder in holders:
        if holder.child.returncode is None:
            holder.end()


def test_stat_lines_with_odd_names():
    """The program's name may hold blanks and brackets; Z and X are dead."""
    kin = process.parse_stat(b"7 (a b) (c) S 5 6 4 0 -1 0")
    assert (kin.parent, kin.group, kin.session, kin.dead) == (5, 6, 4, False)
    assert process.parse_stat(b"7 (x) Z 5 6 4 0 -1 0").dead
    assert process.parse_stat(b"") is None


def test_a_tree_is_descendants_and_what_is_left_of_the_session(fixtures):
    """Children in other sessions count, and so does a child that init took over; zombies and others do not."""
    kinship = process.read_kinship(fixtures / "proc/tree/proc")
    assert process.members(kinship, 100) == [100, 101, 102, 104]
    assert process.members(kinship, 200) == [200]
    assert process.members(kinship, 102) == [102]
    assert process.members(kinship, 103) == []
    assert process.members(kinship, 999) == []


def test_one_process_is_read_from_its_files(fixtures):
    """PSS and RSS from smaps_rollup, the peak from VmHWM."""
    reading = process.read_process(101, fixtures / "proc/tree/proc")
    assert reading == ProcessReading(rss=900000 * KIB, pss=880000 * KIB, peak=1000000 * KIB, mapped=239 * KIB)


def test_without_smaps_rollup_shared_pages_count_in_full(fixtures):
    """RSS stands for PSS where the latter cannot be read."""
    reading = process.read_process(104, fixtures / "proc/tree/proc")
    assert reading == ProcessReading(rss=5000 * KIB, pss=5000 * KIB, peak=6000 * KIB)


@pytest.mark.parametrize("pid", [103, 999])
def test_a_dead_process_takes_nothing(fixtures, pid):
    """A zombie and a process that is gone have no reading."""
    assert process.read_process(pid, fixtures / "proc/tree/proc") is None


@pytest.mark.parametrize(
    ("rollup", "mapped"),
    [
        ("Pss: 900 kB\nPss_File: 600 kB\nLocked: 0 kB\n", 600 * KIB),
        ("Pss: 900 kB\nPss_File: 600 kB\nLocked: 600 kB\n", 0),
        ("Pss: 900 kB\nPss_File: 600 kB\nLocked: 800 kB\n", 0),
        ("Pss: 900 kB\nPss_File: 600 kB\n", 600 * KIB),
        ("Pss: 900 kB\n", None),
    ],
)
def test_file_pages_that_are_not_locked_are_mapped(tmp_path, rollup, mapped):
    """Locked pages cannot be dropped, so the kernel does not count them as available; old kernels tell nothing."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/smaps_rollup").write_text(f"00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss: 900 kB\n{rollup}")
    assert process.read_process(7, tmp_path).mapped == mapped


def read_captured(fixtures, pid, nvml=None):
    """A captured tree, with the GPUs of a captured NVML."""
    proc = fixtures / "proc/tree/proc"
    devices = nvidia.read_devices(nvml)
    members = process.members(process.read_kinship(proc), pid)
    readings = {member: process.read_process(member, proc) for member in members}
    shared = frozenset(device.pool for device in devices if device.unified)
    return process._sum(readings, nvidia.process_bytes(nvml, devices), shared)


def read_one(fixtures):
    """A function from the number of a captured process to its reading."""
    return lambda pid: process.read_process(pid, fixtures / "proc/tree/proc")


def test_the_peak_leaves_out_what_the_processes_share(fixtures):
    """Sum of the peaks less the sum of (RSS - PSS): shared pages are in the peak of each process that maps them."""
    tree = read_captured(fixtures, 100)
    assert tree.pids == (100, 101, 102, 104)
    assert tree.ram == (180000 + 880000 + 20000 + 5000) * KIB
    assert tree.mapped == sum(reading.mapped or 0 for reading in map(read_one(fixtures), tree.pids))
    shared = (20000 + 20000 + 20000) * KIB
    assert tree.ram_peak == (300000 + 1000000 + 40000 + 6000) * KIB - shared


def test_gpu_bytes_of_the_whole_tree_count(fixtures, replay):
    """Processes of the tree only, summed per pool."""
    assert read_captured(fixtures, 100, replay("rtx4090")).gpu == {"cuda:0": 4563402752}
    assert read_captured(fixtures, 200, replay("rtx4090")).gpu == {}


def test_a_gpu_share_that_is_unknown_is_left_out(fixtures, replay):
    """One process of the tree without a size: the pool's sum is unknown, the other pool's is not."""
    assert read_captured(fixtures, 100, replay("two_cards")).gpu == {"cuda:0": 500000000}


def test_on_a_unified_machine_gpu_bytes_are_ram(fixtures, replay):
    """Device allocations of an integrated GPU count in the one pool there is."""
    plain, unified = read_captured(fixtures, 100), read_captured(fixtures, 100, replay("gb10"))
    assert unified.gpu == {}
    assert unified.ram == plain.ram + 20064501760
    assert unified.ram_peak == plain.ram_peak + 20064501760


def test_a_real_tree_shows_its_bytes(hold):
    """What a process and its child (in another session) hold is in the reading, and little more."""
    bare = hold(0)
    holder = hold(48 * MIB, below=32 * MIB)
    tree, empty = process.read_tree(holder.pid), process.read_tree(bare.pid)
    assert set(tree.pids) == {holder.pid, holder.below}
    # The child is a second interpreter; what interpreters share is counted once.
    assert 80 * MIB <= tree.ram <= 80 * MIB + 2 * empty.ram + 8 * MIB
    assert tree.ram_peak >= tree.ram


@linux_only
def test_a_real_tree_agrees_with_psutil(hold):
    """Our sum is psutil's sum of PSS over the same processes."""
    holder = hold(16 * MIB, below=8 * MIB)
    ours = process.read_tree(holder.pid)
    theirs = sum(psutil.Process(pid).memory_full_info().pss for pid in ours.pids)
    assert abs(ours.ram - theirs) <= MIB


@linux_only
def test_a_mapped_file_is_told_apart(tmp_path):
    """Pages of a file count in the tree as mapped; memory of its own does not."""
    weights = tmp_path / "weights"
    weights.write_bytes(os.urandom(24 * MIB))
    code = (
        "import mmap, sys; held = bytearray(b'x' * (40 << 20)); file = open(sys.argv[1], 'rb');"
        "seen = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ);"
        "sum(seen[at] for at in range(0, len(seen), 4096)); print('ready', flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(weights)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    tree = process.read_tree(child.pid)
    child.stdin.close()
    child.wait()
    child.stdout.close()
    assert 24 * MIB <= tree.mapped <= 24 * MIB + 16 * MIB  # what more there is, are its libraries
    assert tree.ram >= tree.mapped + 40 * MIB


@linux_only
def test_the_peak_remembers_what_was_given_back(hold):
    """After memory is freed, the reading falls and the peak does not."""
    holder = hold(64 * MIB)
    before = process.read_tree(holder.pid)
    holder.tell("shrink")
    after = process.read_tree(holder.pid)
    assert after.ram <= before.ram - 60 * MIB
    assert after.ram_peak >= before.ram - MIB  # the kernel's high-water mark comes from inexact counters


def test_several_trees_are_read_at_once(hold):
    """Each tree has its own reading; one that is gone has None."""
    first, second = hold(20 * MIB), hold(40 * MIB)
    second_pid = second.pid
    trees = process.read_trees([first.pid, second_pid])
    assert trees[second_pid].ram > trees[first.pid].ram >= 20 * MIB
    second.end()
    trees = process.read_trees([first.pid, second_pid])
    assert trees[second_pid] is None
    assert trees[first.pid] is not None


def test_an_unreaped_child_is_gone(hold):
    """A process that ended but was not waited for holds no memory: None."""
    holder = hold(0)
    holder.child.stdin.close()
    os.waitid(os.P_PID, holder.pid, os.WEXITED | os.WNOWAIT)
    assert process.read_tree(holder.pid) is None


@linux_only
def test_a_child_that_outlives_its_parent_still_counts():
    """The leader of the session is dead, its child holds memory: the tree is not gone."""
    leave = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {HOLDER!r}, '{16 * MIB}']); p.wait()"
    leader = subprocess.Popen(
        [sys.executable, "-c", leave],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert leader.stdout.readline().startswith("ready")
    leader.kill()
    leader.wait()
    try:
        tree = process.read_tree(leader.pid)
        assert leader.pid not in tree.pids
        assert tree.ram >= 16 * MIB
    finally:
        leader.stdin.close()  # the child ends with its input
        leader.stdout.read()  # until it has
        leader.stdout.close()


def test_pss_of_one_process(hold):
    """One process without its children; None when it is gone."""
    holder = hold(16 * MIB, below=64 * MIB)
    assert 16 * MIB <= process.pss_of(holder.pid) < 64 * MIB
    holder.end()
    assert process.pss_of(holder.pid) is None


@linux_only
def test_the_sampler_walks_only_what_moved(hold, monkeypatch):
    """A process that stays as it is, is not walked again until its turn; one that grows by more than the slack is."""
    holder = hold(64 * MIB)
    walked = []
    real = process.read_process
    monkeypatch.setattr(process, "read_process", lambda pid: walked.append(pid) or real(pid))
    sampler = TreeSampler()
    first = sampler.sample([holder.pid])[holder.pid]
    for _ in range(5):
        assert sampler.sample([holder.pid])[holder.pid] is not None
    assert len(walked) <= 2  # the first walk, and at most one whose turn came
    walked.clear()
    holder.tell(f"grow {32 * MIB}")
    grown = sampler.sample([holder.pid])[holder.pid]
    assert walked == [holder.pid]
    # Others that start meanwhile share libraries with it, which makes its part of those smaller.
    assert 31 * MIB <= grown.ram - first.ram <= 36 * MIB


@linux_only
def test_the_sampler_counts_small_growth_without_a_walk(hold, monkeypatch):
    """Growth within the slack is in the next sample, from the resident size."""
    holder = hold(256 * MIB)
    sampler = TreeSampler()
    sampler._known[holder.pid] = process._Known(process.read_process(holder.pid), process._status(holder.pid)[0], age=0)
    before = process.read_tree(holder.pid)
    holder.tell(f"grow {MIB}")
    monkeypatch.setattr(process, "read_process", lambda pid: pytest.fail("walked"))
    after = sampler.sample([holder.pid])[holder.pid]
    assert MIB // 2 <= after.ram - before.ram <= 4 * MIB


@linux_only
def test_the_sampler_measures_every_process_anew_in_turn(hold, monkeypatch):
    """Sharing changes without the resident size, so each process is walked once in so many samples."""
    holder = hold(MIB)
    walked = []
    real = process.read_process
    monkeypatch.setattr(process, "read_process", lambda pid: walked.append(pid) or real(pid))
    sampler = TreeSampler()
    for _ in range(2 * (TreeSampler.EVERY + 1)):
        sampler.sample([holder.pid])
    assert 2 <= len(walked) <= 3


def test_the_sampler_forgets_what_is_gone(hold):
    """A tree that ended is None, and its number is forgotten."""
    holder = hold(MIB)
    sampler = TreeSampler()
    assert sampler.sample([holder.pid])[holder.pid] is not None
    holder.end()
    assert sampler.sample([holder.pid]) == {holder.pid: None}
    assert sampler._known == {}
