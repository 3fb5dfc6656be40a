"""The storms of `benchmarks/`, in the lengths that CI can afford; each judges itself from outside."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(program, *arguments, within):
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / program), *arguments, "--check"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=within,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.engines
def test_a_minute_of_chaos_breaks_no_rule():
    """Requests, disconnects, kills, lies, edits and foreign memory at once: every invariant of the observer holds."""
    run("chaos.py", "--seconds", "60", "--seed", "1", within=240)


@pytest.mark.engines
def test_a_killed_daemon_leaves_nobody_behind():
    """16: after kill -9 under load everything it had started has ended, or answers for the next daemon."""
    run("kill.py", "--rounds", "5", within=240)


@pytest.mark.engines
def test_many_requests_in_room_for_two_are_all_answered():
    """Five models under a budget that holds two: nothing lost, nothing out of memory, waits within their bound."""
    run("endurance.py", "--requests", "500", within=240)
