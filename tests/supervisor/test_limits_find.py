"""Where groups can be made: delegated, at the top, v1, or nowhere with the reason; what is left there is found."""

from __future__ import annotations

import os
import re

import pytest
from tests.fake_cgroups import FakeCgroups

from pagein.config.schema import LimitMode
from pagein.supervisor.limits import find_limiter, foresee

MIB = 1024**2
ME = os.getpid()
WORKER = 2**22 + 7
"""No process of this machine: the highest number is below."""
AUTO = LimitMode.AUTO


@pytest.fixture
def user(monkeypatch):
    """Not root, whatever runs the tests: the top of the hierarchy is out of reach."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)


@pytest.fixture
def root(monkeypatch):
    """Root, whatever runs the tests."""
    monkeypatch.setattr(os, "geteuid", lambda: 0)


@pytest.fixture
def v2(tmp_path):
    """A v2 machine; its daemon runs in a group of its own."""
    files = FakeCgroups(tmp_path / "machine", 2)
    files.at("/app/pagein.service", ME)
    files.live_in("/app/pagein.service")
    return files


@pytest.fixture
def v1(tmp_path):
    """A v1 machine; its daemon shares a group with others."""
    files = FakeCgroups(tmp_path / "machine", 1)
    files.at("/jobs/a", ME, 4711)
    files.live_in("/jobs/a")
    return files


# ── v2, delegated ───────────────────────────────────────────────────────────────────────────────────


def test_a_delegated_group_is_divided(v2, user, tmp_path):
    """The daemon moves into a leaf, memory is handed down twice, the trial group is gone."""
    limiter = find_limiter(AUTO, tmp_path, v2)
    base = v2.top / "app/pagein.service"
    assert limiter.hard
    assert limiter.describe() == "each worker in a cgroup of its own (v2, below /app/pagein.service)"
    assert (v2.pids(base), v2.pids(base / "daemon")) == ([], [ME])
    parent = next(group for group in v2.children(base) if group.name.startswith("pagein-"))
    assert v2.words(base / "cgroup.subtree_control") == ["memory"]
    assert v2.words(parent / "cgroup.subtree_control") == ["memory"]
    assert v2.children(parent) == []
    assert ("memory.max", str(64 * MIB)) in v2.written


def test_a_worker_gets_a_group_with_a_name_of_its_own(v2, user, tmp_path):
    """Two workers of one model, one after the other, never share a group; dots and slashes do not reach the kernel."""
    limiter = find_limiter(AUTO, tmp_path, v2)
    cells = [limiter.confine("qwen3/0.6b", WORKER + at, 100 * MIB) for at in range(2)]
    assert len({cell.directory for cell in cells}) == 2
    assert all(re.fullmatch("qwen3_0_6b-[0-9a-f]{8}", cell.directory.name) for cell in cells)
    assert [(cell.limit, cell.pids()) for cell in cells] == [(100 * MIB, [WORKER]), (100 * MIB, [WORKER + 1])]


def test_closing_leaves_the_group_as_it_was(v2, user, tmp_path):
    """Parent and leaf go, the daemon is where it was; so it is asked again afterwards."""
    limiter = find_limiter(AUTO, tmp_path, v2)
    limiter.close()
    base = v2.top / "app/pagein.service"
    assert (v2.pids(base), v2.children(base), v2.words(base / "cgroup.subtree_control")) == ([ME], [], [])
    assert find_limiter(AUTO, tmp_path, v2).hard
    limiter.close()  # a second time it must not undo what the new one did
    assert v2.pids(base / "daemon") == [ME]


def test_groups_in_use_outlive_the_limiter(v2, user, tmp_path):
    """A worker that lives on keeps its limit; the place stays divided for it."""
    limiter = find_limiter(AUTO, tmp_path, v2)
    cell = limiter.confine("m", WORKER, 100 * MIB)
    limiter.close()
    assert (cell.limit, cell.pids()) == (100 * MIB, [WORKER])
    assert v2.pids(v2.top / "app/pagein.service/daemon") == [ME]


def test_a_daemon_that_lives_in_a_leaf_divides_the_group_above(v2, user, tmp_path):
    """After a restart in place, and with systemd's DelegateSubgroup=daemon, where memory is not handed down yet."""
    base = v2.top / "app/pagein.service"
    (base / "cgroup.procs").write_text("")
    v2.make(base / "daemon")
    (base / "daemon/cgroup.procs").write_text(f"{ME}\n")
    v2.live_in("/app/pagein.service/daemon")
    limiter = find_limiter(AUTO, tmp_path, v2)
    assert limiter.describe().endswith("below /app/pagein.service)")
    assert v2.children(base / "daemon") == []


def test_a_group_with_other_processes_is_left_alone(v2, user, tmp_path):
    """A shell's group is not ours to divide: nothing is moved, and the watchdog is named with the reason."""
    base = v2.at("/app/pagein.service", ME, WORKER)
    limiter = find_limiter(AUTO, tmp_path, v2)
    assert not limiter.hard
    assert limiter.describe() == (
        "the watchdog ends a worker that outgrows its allowance; no cgroup for each: "
        f"cgroup v2 /app/pagein.service holds other processes too ({WORKER})"
    )
    assert (v2.written, v2.pids(base), v2.children(base)) == ([], [ME, WORKER], [])
    assert limiter.confine("m", WORKER, 100 * MIB) is None
    assert limiter.sweep() == []
    limiter.close()


def test_without_the_memory_controller_there_is_no_place(tmp_path, user):
    """A group may be ours and still not have memory handed down to it."""
    files = FakeCgroups(tmp_path / "machine", 2, controllers="cpu pids")
    files.at("/app", ME)
    files.live_in("/app")
    words = find_limiter(AUTO, tmp_path, files).describe()
    assert words.endswith("cgroup v2 /app has no memory controller")


def test_what_does_not_work_out_is_undone(v2, user, tmp_path, monkeypatch):
    """A limit that the kernel does not keep is none: nothing is left of the attempt."""
    write = FakeCgroups.write

    def deaf(self, path, value):
        if path.name != "memory.max":
            write(self, path, value)

    monkeypatch.setattr(FakeCgroups, "write", deaf)
    limiter = find_limiter(AUTO, tmp_path, v2)
    assert not limiter.hard
    assert "reads back as None" in limiter.describe()
    base = v2.top / "app/pagein.service"
    assert (v2.pids(base), v2.children(base)) == ([ME], [])


def test_a_kernel_that_refuses_to_hand_memory_down_is_survived(v2, user, tmp_path, monkeypatch):
    """The daemon goes back from its leaf, and says what the kernel said."""
    monkeypatch.setattr(FakeCgroups, "_hand_down", fails(PermissionError(13, "Permission denied")))
    limiter = find_limiter(AUTO, tmp_path, v2)
    assert "Permission denied" in limiter.describe()
    base = v2.top / "app/pagein.service"
    assert (v2.pids(base), v2.children(base)) == ([ME], [])


def fails(error):
    """A method that raises."""

    def method(*_args):
        raise error

    return method


def test_a_worker_that_the_kernel_refuses_has_no_cell(v2, user, tmp_path, caplog, monkeypatch):
    """The daemon goes on with its watchdog; the group that was begun is gone, the log has the reason."""
    limiter = find_limiter(AUTO, tmp_path, v2)
    monkeypatch.setattr(FakeCgroups, "_move", fails(ProcessLookupError(3, "No such process")))
    assert limiter.confine("m", WORKER, 100 * MIB) is None
    assert f"no cgroup of 100 MiB for m (process {WORKER})" in caplog.text
    parent = next(group for group in v2.children(v2.top / "app/pagein.service") if group.name != "daemon")
    assert v2.children(parent) == []


# ── v2 as root ──────────────────────────────────────────────────────────────────────────────────────


def test_root_takes_the_top_where_nothing_limits_it(v2, root, tmp_path):
    """Without systemd, and with a group that is not ours alone."""
    v2.at("/app/pagein.service", ME, WORKER)
    limiter = find_limiter(AUTO, tmp_path, v2)
    assert limiter.describe() == "each worker in a cgroup of its own (v2, below /)"
    assert limiter.confine("m", WORKER, 100 * MIB).directory.parent.parent == v2.top
    assert v2.pids(v2.top / "app/pagein.service") == [ME]


def test_workers_do_not_escape_a_limit_of_their_daemon(v2, root, tmp_path):
    """A slice that limits the daemon limits its workers: the top would free them."""
    v2.at("/app/pagein.service", ME, WORKER)
    (v2.top / "app/memory.max").write_text("1000000000")
    words = find_limiter(AUTO, tmp_path, v2).describe()
    assert "workers at the top would escape" in words


def test_the_top_itself_may_hold_the_daemon(v2, root, tmp_path):
    """The real top may have processes and limited groups together: nobody is moved."""
    v2.at("/app/pagein.service")
    (v2.top / "cgroup.procs").write_text(f"{ME}\n1\n")
    (v2.top / "cgroup.subtree_control").write_text("")
    v2.live_in("/")
    assert find_limiter(AUTO, tmp_path, v2).hard
    assert v2.pids(v2.top) == [ME, 1]


# ── v1 ──────────────────────────────────────────────────────────────────────────────────────────────


def test_v1_takes_groups_below_ours(v1, root, tmp_path):
    """Other processes in it do not matter there."""
    limiter = find_limiter(AUTO, tmp_path, v1)
    assert limiter.describe() == "each worker in a cgroup of its own (v1, below /jobs/a)"
    cell = limiter.confine("m", WORKER, 100 * MIB)
    assert (cell.version, cell.limit, cell.pids()) == (1, 100 * MIB, [WORKER])
    assert v1.pids(v1.top / "jobs/a") == [ME, 4711]


def test_v1_counts_children_on_old_kernels_too(v1, root, tmp_path, monkeypatch):
    """Where a group is not hierarchical by itself, ours is made so before it has children."""
    made = FakeCgroups.make

    def flat(self, group):
        made(self, group)
        (group / "memory.use_hierarchy").write_text("0")

    monkeypatch.setattr(FakeCgroups, "make", flat)
    assert find_limiter(AUTO, tmp_path, v1).hard
    assert v1.written[0] == ("memory.use_hierarchy", "1")


def test_a_read_only_tree_means_the_watchdog(v1, user, tmp_path, monkeypatch):
    """As in most containers."""
    monkeypatch.setattr(FakeCgroups, "may_write", lambda self, *paths: False)
    words = find_limiter(AUTO, tmp_path, v1).describe()
    assert words.endswith("no cgroup for each: cgroup v1 /jobs/a is not writable")


# ── what a killed daemon left ───────────────────────────────────────────────────────────────────────


def test_the_next_daemon_finds_the_groups_of_the_last_scope(v2, user, tmp_path):
    """After a kill -9 the new daemon sits in another scope: the old one's groups beside it are found by their name."""
    old = find_limiter(AUTO, tmp_path, v2)
    living, empty = old.confine("a", WORKER, 100 * MIB), old.confine("b", WORKER + 1, 100 * MIB)
    (empty.directory / "cgroup.procs").write_text("")
    v2.at("/app/next.scope", ME)
    v2.live_in("/app/next.scope")
    new = find_limiter(AUTO, tmp_path, v2)
    mine = new.confine("c", WORKER + 2, 100 * MIB)
    (left,) = new.sweep()
    assert (left.directory, left.pids(), left.limit) == (living.directory, [WORKER], 100 * MIB)
    assert not empty.directory.exists()
    assert mine.pids() == [WORKER + 2]
    assert new.sweep() == []
    (living.directory / "cgroup.procs").write_text("")
    assert left.remove()
    new.close()
    assert not living.directory.parent.exists()


def test_groups_of_another_state_folder_are_not_touched(v2, user, tmp_path):
    """Two Pagein daemons in one group: neither sees the other's."""
    one = find_limiter(AUTO, tmp_path / "one", v2)
    cell = one.confine("m", WORKER, 100 * MIB)
    (cell.directory / "cgroup.procs").write_text("")
    v2.live_in("/app/pagein.service/daemon")
    two = find_limiter(AUTO, tmp_path / "two", v2)
    assert two.sweep() == []
    assert cell.directory.exists()


# ── modes, and looking only ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mode", "word"), [(LimitMode.WATCHDOG, "watchdog"), (LimitMode.OFF, "off")])
def test_other_modes_touch_nothing(v2, user, tmp_path, mode, word):
    """What the configuration chose is said, and no group is made."""
    limiter = find_limiter(mode, tmp_path, v2)
    assert not limiter.hard
    assert f"supervisor.limits is {word}" in limiter.describe()
    assert foresee(mode, v2).words == limiter.describe()
    assert v2.written == []


def test_looking_ahead_changes_nothing(v2, v1_elsewhere, user):
    """The doctor tells what a daemon would find: the same words, no group, no move."""
    for files in (v2, v1_elsewhere):
        prospect = foresee(files=files)
        assert prospect.hard
        assert prospect.words == find_limiter(AUTO, files.root, files).describe()
    assert foresee(files=FakeCgroups(v2.root / "empty", 2, controllers="")).hard is False


@pytest.fixture
def v1_elsewhere(tmp_path):
    """A second machine, with v1."""
    files = FakeCgroups(tmp_path / "elsewhere", 1)
    files.at("/jobs", ME)
    files.live_in("/jobs")
    return files


def test_a_machine_without_any_of_it(tmp_path, user):
    """No /proc at all, or another system: the watchdog, with words."""
    files = FakeCgroups(tmp_path / "machine", 1)
    words = foresee(files=files).words
    assert words.startswith("the watchdog ends a worker")
    assert "no memory controller here" in words
