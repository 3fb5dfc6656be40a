"""Runs a way: a process of its own, in a memory group of its own, on files that are not in the page cache."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from common.disk import drop_from_cache
from common.group import memory_group
from common.process import Program
from kv_arms.running import Run, environment, outcome_of, run_module
from parts_arms.cases import Case, Setting

MODULE = "parts_arms.serve"


def run_case(case: Case, told: Setting, logs: Path, number: int = 0) -> Run:
    """Run one way once; a killed one is a result, too."""
    drop_from_cache(told.models.files())
    return run_module(MODULE, case.arguments(told), f"{case.key} {number}", logs, case.limit)


def run_together(case: Case, told: Setting, limit: int, logs: Path) -> list[Run]:
    """Run several instances of a way at once in one group."""
    drop_from_cache(told.models.files())
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(memory_group(limit))
        programs = []
        for number in range(told.instances):
            command = [sys.executable, "-m", MODULE, *case.arguments(told)]
            program = Program(f"{case.key}-{number}", command, logs, environment(), group.folder)
            programs.append(stack.enter_context(program))
        return [outcome_of(program, group) for program in programs]


def run_step(name: str, arguments: Sequence[str], told: Setting, logs: Path, key: str = "") -> Run:
    """Run one of the single steps: a module of this package."""
    drop_from_cache(told.models.files())
    return run_module(f"parts_arms.{name}", arguments, key or name, logs, None)
