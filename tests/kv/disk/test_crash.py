"""Crashes in the middle of saving, forgetting and opening (scenarios 7 and 13 of the KV list)."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kv.disk.build import disk_bytes
from tests.kv.disk.crash import CAP, check

pytestmark = pytest.mark.scenarios

SCRIPT = Path(__file__).parent / "crash.py"
TOP = Path(__file__).parents[3]
EVERY = 3
"""Moments from one that is tried to the next: all of them take a minute."""


def command(*args):
    return [sys.executable, str(SCRIPT), *map(str, args)]


def environment():
    return {"PYTHONPATH": os.pathsep.join([str(TOP), str(TOP / "src")]), "PATH": os.environ["PATH"]}


def test_kills_at_random_moments_lose_nothing_and_leak_nothing(tmp_path):
    """A process that saves turn after turn is killed at 20 moments: each time all is sound, and nothing grows.

    It is started without the environment of the one before: nothing that serves hangs on a seed of the process.
    """
    chance = random.Random(5)
    most = 0
    for _ in range(20):
        with subprocess.Popen(
            command("loop", tmp_path), env=environment(), stdout=subprocess.PIPE, text=True
        ) as process:
            for _ in range(chance.randint(1, 30)):
                process.stdout.readline()
            for _ in range(chance.randint(0, 100_000)):
                pass  # a moment within the turn that was begun
            process.kill()
        check(tmp_path)
        most = max(most, disk_bytes(tmp_path))
    assert 0 < most <= CAP


def test_a_kill_at_any_step_of_a_turn_leaves_it_done_or_not_begun(tmp_path):
    """SIGKILL before and after calls of opening, saving and forgetting: the turn before or this one, and no third."""
    done = subprocess.run(
        command("step", tmp_path, EVERY), env=environment(), capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [line.split()[1] for line in done.stdout.splitlines()]
    assert ends.count("killed") >= 30
    assert ends[-1] == "done"
