"""Runs a measured module: a process of its own, in a memory group of its own; its last line of JSON is the result."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.group import Group, memory_group
from common.process import Program
from common.wire import BenchmarkError
from kv_arms.cases import Case, Setting

HERE = Path(__file__).parents[1]
LONGEST = 900.0


@dataclass(frozen=True, slots=True)
class Run:
    """What one run gave, or why it gave nothing."""

    told: dict[str, Any] | None
    group_peak: int = 0
    """Bytes: the most that its group ever had, page cache included; 0 where it was in none."""
    failure: str | None = None
    done: int = 0
    """Turns that were answered."""


def run_case(case: Case, told: Setting, logs: Path) -> Run:
    """Run one way once; a killed one is a result, too."""
    tiers = told.scratch / "tiers"
    shutil.rmtree(tiers, ignore_errors=True)
    tiers.mkdir(parents=True)
    try:
        return run_module("pagein.kv.trial.run", case.arguments(told), case.key, logs, case.limit)
    finally:
        shutil.rmtree(tiers, ignore_errors=True)


def run_module(module: str, arguments: Sequence[str], name: str, logs: Path, limit: int | None) -> Run:
    """Run a module that prints lines of JSON."""
    command = [sys.executable, "-m", module, *arguments]
    with contextlib.ExitStack() as stack:
        group = None if limit is None else stack.enter_context(memory_group(limit))
        cgroup = None if group is None else group.folder
        program = stack.enter_context(Program(name.replace(" ", "-"), command, logs, environment(), cgroup))
        return outcome_of(program, group)


def outcome_of(program: Program, group: Group | None) -> Run:
    """Wait for the end of a program that prints lines of JSON, and say what it gave, or why it gave nothing."""
    ended = _wait(program)
    lines = [line for line in program.log.read_text(errors="replace").splitlines() if line.startswith("{")]
    events = [json.loads(line) for line in lines]
    done = sum(event["event"] == "progress" and not event.get("failed") for event in events)
    peak = 0 if group is None else group.peak()
    last = events[-1] if events else {}
    if last.get("event") == "error":
        return Run(None, peak, str(last["message"]), done)
    if ended or last.get("event") != "ran":
        killed = group is not None and group.killed() > 0
        return Run(
            None, peak, "killed: out of memory" if killed else f"ended with {ended}: {_last_words(program)}", done
        )
    return Run(last, peak, None, done)


def environment() -> dict[str, str]:
    """The same for every arm: threads that do not spin, no network."""
    cores = str(len(os.sched_getaffinity(0)))
    path = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    told = {"OMP_NUM_THREADS": cores, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    return {**os.environ, **told}


def _wait(program: Program) -> int:
    try:
        return program.wait(LONGEST)
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"{program.name} is not done after {LONGEST:.0f} s:\n{program.last_output()}") from None


def _last_words(program: Program) -> str:
    lines = [line for line in program.last_output().splitlines() if line.strip() and not line.startswith("{")]
    return lines[-1][:200] if lines else "said nothing"
