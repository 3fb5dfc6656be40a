"""The office example, end to end and short: train, analyse, apply, answer."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m-hf"
EXAMPLE = ROOT / "examples" / "office"
TASKS = ("summarise", "grammar", "email", "translate")

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs pagein[torch]", allow_module_level=True)


def run(*command: object) -> str:
    """Run a command of the guide and return what it prints; anything but success fails the test."""
    environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=280, env=environment, check=False
    )
    assert done.returncode == 0, f"{command}: {done.stderr[-2000:]}"
    return done.stdout


def test_the_example_runs_from_training_to_answers(tmp_path: Path):
    """Each task gets an adapter part of its own, and a call of one task loads no other's."""
    if not (MODEL / "config.json").is_file():
        assert not os.environ.get("CI"), "CI must have the weights: run scripts/setup dev"
        pytest.skip("the example weights are not here: run scripts/setup dev")
    split = tmp_path / "split"
    trained = run(EXAMPLE / "train.py", MODEL, tmp_path, "--steps", 2)
    assert [line.partition(":")[0] for line in trained.splitlines()[:-1]] == list(TASKS)
    mapping = tmp_path / "task_mapping.yaml"
    run("-m", "pagein", "split", "analyze", MODEL, "--tasks", mapping, "--out", split)
    run("-m", "pagein", "split", "apply", split)
    plan = json.loads((split / "split_plan.json").read_text())
    assert {task: of["parts"] for task, of in plan["tasks"].items()} == {
        task: ["backbone", f"{task}.adapter"] for task in TASKS
    }
    said = run(EXAMPLE / "office.py", split, "grammar", "He have two meeting.")
    loads = dict(re.findall(r"^(\S+): \w+, \d+ bytes, loaded (\d+) times$", said, re.MULTILINE))
    assert loads == {"backbone": "1", **{f"{task}.adapter": str(int(task == "grammar")) for task in TASKS}}
