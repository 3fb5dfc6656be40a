"""Power cuts while a split is written (scenario 15)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.scenarios

SCRIPT = Path(__file__).parent / "crash.py"
TOP = Path(__file__).parents[2]


def test_a_kill_anywhere_leaves_the_old_split_or_the_new(tmp_path):
    """SIGKILL before and after each call of a run: one plan, whole, every file of it proven, leftovers told."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TOP), str(TOP / "src")])},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ends = done.stdout.splitlines()
    assert sum(end.startswith("killed") for end in ends) >= 50
    assert {"killed old", "killed new"} <= set(ends)
    assert ends[-1] == "done new", "not every moment was reached"
