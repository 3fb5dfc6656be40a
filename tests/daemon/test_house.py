"""One daemon per state folder."""

import json
import os
import stat
import subprocess
import sys

import pytest

from pagein.daemon.house import House
from pagein.errors import AlreadyRunning
from pagein.supervisor.registry import Registry


def test_a_second_daemon_is_refused_with_the_first_one_s_address(tmp_path):
    """Two managers never own the same processes (row G11)."""
    with House(tmp_path) as first:
        first.publish("http://127.0.0.1:7311")
        with pytest.raises(AlreadyRunning, match=r"process \d+ at http://127.0.0.1:7311"), House(tmp_path):
            pass
    with House(tmp_path) as again:
        assert not (tmp_path / "daemon.json").exists()
        again.publish("http://127.0.0.1:1")


def test_the_folder_and_the_address_are_the_owner_s_alone(tmp_path):
    """State, sockets and address are readable by the owner only, and gone afterwards."""
    state = tmp_path / "state"
    with House(state) as house:
        house.publish("http://127.0.0.1:7311")
        run_dir = house.run_dir
        for path in (state, run_dir):
            assert stat.S_IMODE(path.stat().st_mode) == 0o700
        assert stat.S_IMODE((state / "daemon.json").stat().st_mode) == 0o600
        assert json.loads((state / "daemon.json").read_text())["address"] == "http://127.0.0.1:7311"
        assert len(str(run_dir / "abcdef01" / "w.sock")) < 100
    assert not run_dir.exists()


def killed(house):
    """Leave a house as SIGKILL does: the kernel takes the lock back, and nothing else happens."""
    house._lock.close()


def test_what_a_killed_daemon_left_is_cleaned_up_by_the_next(tmp_path, monkeypatch):
    """Its folder of sockets and its address are gone; nothing else in that place is touched."""
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    (runtime / "pagein-other").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    monkeypatch.setattr("pagein.daemon.house._LONGEST_BASE", 500)
    first = House(tmp_path / "state").__enter__()
    left = first.run_dir
    assert left.parent == runtime
    (left / "w1").mkdir()
    (left / "w1" / "w.sock").touch()
    first.publish("http://127.0.0.1:7311")
    killed(first)
    assert left.exists()
    with House(tmp_path / "state") as second:
        assert not left.exists()
        assert not (tmp_path / "state" / "daemon.json").exists(), "the address of a daemon that is dead"
        assert second.run_dir != left
    assert [entry.name for entry in runtime.iterdir()] == ["pagein-other"]


@pytest.mark.parametrize("recorded", ["", "/", "{victim}", "{link}", "{missing}", "\udcff"])
def test_only_a_folder_of_sockets_is_removed(tmp_path, recorded):
    """A record that is damaged, stale, or names anything else is dropped, and what it names stays."""
    victim = tmp_path / "victim"
    victim.mkdir()
    link = tmp_path / "pagein-link"
    link.symlink_to(victim)
    text = recorded.format(victim=victim, link=link, missing=tmp_path / "pagein-gone")
    state = tmp_path / "state"
    state.mkdir()
    (state / "run-dir").write_text(text, errors="surrogateescape")
    with House(state):
        assert not (state / "run-dir").exists()
    assert victim.is_dir()
    assert link.is_symlink()


def test_a_folder_of_somebody_else_is_not_removed(tmp_path, monkeypatch):
    """After a reboot the name in a shared place may be another user's."""
    folder = tmp_path / "pagein-abcd"
    folder.mkdir()
    state = tmp_path / "state"
    state.mkdir()
    (state / "run-dir").write_text(str(folder))
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    with House(state):
        pass
    assert folder.is_dir()


def test_a_refused_daemon_touches_nothing_of_the_first(tmp_path):
    """It has not got the lock: address and sockets of the one that runs stay."""
    with House(tmp_path) as first:
        folder = first.run_dir
        first.publish("http://127.0.0.1:7311")
        with pytest.raises(AlreadyRunning), House(tmp_path):
            pass
        assert folder.is_dir()
        assert (tmp_path / "daemon.json").exists()
        assert (tmp_path / "run-dir").read_text().strip() == str(folder)


def test_a_daemon_that_starts_is_named_before_it_has_an_address(tmp_path):
    """The lock tells the process at once; the address of one that was killed before it is not told as its own."""
    first = House(tmp_path).__enter__()
    first.publish("http://127.0.0.1:1")
    killed(first)
    told = (tmp_path / "daemon.json").read_text().replace(str(os.getpid()), "1")
    with House(tmp_path):
        (tmp_path / "daemon.json").write_text(told)
        with pytest.raises(AlreadyRunning, match=rf"process {os.getpid()}; it has not told its address yet"):
            House(tmp_path).__enter__()


def heir(state, folder, pid):
    """Record a worker that waits for the next daemon."""
    registry = Registry.open(state, adopt_wait=60.0)
    entry = registry.enter(registry.new_mark(), pid)
    entry.become_worker(name="m", digest="", token="t", socket_dir=str(folder), allowance={}, adoptable=True)
    registry._writer.shutdown()


@pytest.mark.parametrize("lives", [True, False])
def test_the_folder_of_workers_that_wait_for_the_next_daemon_is_kept(tmp_path, lives):
    """Their sockets lie there; it becomes the new daemon's, and goes with it. Without such a worker it goes at once."""
    state = tmp_path / "state"
    first = House(state).__enter__()
    folder = first.run_dir / "w1234abcd"
    folder.mkdir()
    worker = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"])
    try:
        heir(state, folder, worker.pid)
        (first.run_dir / "wdeadbeef").mkdir()
        killed(first)
        if not lives:
            worker.kill()
            worker.wait()
        with House(state) as second:
            assert folder.exists() == lives
            assert not (first.run_dir / "wdeadbeef").exists(), "of a worker that has ended"
            assert (second.run_dir == first.run_dir) == lives
            assert stat.S_IMODE(second.run_dir.stat().st_mode) == 0o700
        assert not first.run_dir.exists()
        assert not second.run_dir.exists()
    finally:
        worker.kill()
        worker.wait()


def test_a_live_worker_elsewhere_keeps_no_folder(tmp_path):
    """The folder of sockets is kept for those that are in it."""
    state = tmp_path / "state"
    first = House(state).__enter__()
    left = first.run_dir
    heir(state, tmp_path / "other" / "w1234abcd", os.getpid())
    killed(first)
    with House(state):
        assert not left.exists()
