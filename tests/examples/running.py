"""Runs what the guide tells people to run, on the example weights."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
MODELS = ROOT / "models"


def run(*command: object) -> str:
    """Run a command of the guide and return what it prints; anything but success fails the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def model_folder(name: str) -> Path:
    """Return a folder of ``models``, or skip where it is not there, or torch is not."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs pagein[torch]")
    if not (MODELS / name / "config.json").is_file():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    return MODELS / name


def loads(said: str) -> dict[str, int]:
    """How often each part was loaded, as the example says it."""
    found = re.findall(r"^(\S+): \w+, \d+ bytes, loaded (\d+) times$", said, re.MULTILINE)
    return {part: int(count) for part, count in found}
