"""Who belongs to a worker, and who does not."""

from __future__ import annotations

import os
import subprocess
import sys

import psutil
import pytest

from pagein.supervisor.tree import MARK_VARIABLE, Tree, is_running

SLEEPER = [sys.executable, "-S", "-c", "import signal; print(flush=True); signal.pause()"]
STRAY = f"""
import os, subprocess, sys
child = subprocess.Popen({SLEEPER!r}, start_new_session=True, stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
"""


@pytest.fixture
def spawn():
    """Start sleeping processes with a mark; all are killed at the end."""
    started = []

    def make(mark, code=SLEEPER):
        process = subprocess.Popen(code, stdout=subprocess.PIPE, text=True, env={**os.environ, MARK_VARIABLE: mark})
        started.append(process)
        return process, process.stdout.readline()

    yield make
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_process_whose_parent_has_ended_is_found_by_its_mark(spawn):
    """Parentage is lost with the parent; the inherited mark is not."""
    root, _ = spawn("mine")
    tree = Tree(root.pid, "mine")
    parent, line = spawn("mine", [sys.executable, "-S", "-c", STRAY])
    parent.wait()
    stray = psutil.Process(int(line))
    assert stray not in tree.members()
    assert stray in tree.hidden()
    assert tree.kill(timeout=30) == []
    assert not is_running(stray)


def test_processes_of_others_are_never_touched(spawn):
    """Another worker's tree, and everything without a mark, stays."""
    root, _ = spawn("mine")
    other, _ = spawn("theirs")
    tree = Tree(root.pid, "mine")
    assert tree.kill(timeout=30) == []
    assert root.wait() == -9
    assert other.poll() is None
    assert is_running(psutil.Process(os.getpid()))


def test_a_reused_process_id_is_another_process(spawn, monkeypatch):
    """A number that the system gave to somebody else meanwhile is not killed."""
    root, _ = spawn("mine")
    tree = Tree(root.pid, "mine")
    bystander, _ = spawn("theirs")
    number = bystander.pid
    monkeypatch.setattr(tree.root, "_pid", number)  # the same object now names the bystander's number
    monkeypatch.setattr(tree.root, "_proc", psutil.Process(number)._proc)
    assert not is_running(tree.root)
    tree.kill(timeout=30)
    assert bystander.poll() is None


def test_a_zombie_does_not_count_as_running(spawn):
    """An ended process that its parent has not collected holds no memory."""
    process, _ = spawn("mine")
    watched = psutil.Process(process.pid)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert watched.status() == psutil.STATUS_ZOMBIE
    assert not is_running(watched)
