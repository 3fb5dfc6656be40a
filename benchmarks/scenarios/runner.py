"""Runs the scenarios against managers; each gives pass, fail or not applicable, with one line of evidence."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

import scenarios.cases  # noqa: F401  # fills the list
from common.wire import BenchmarkError
from scenarios.client import Later
from scenarios.contract import Fails, Manager, NotApplicable, Stage
from scenarios.registry import SCENARIOS, Scenario

LONGEST = 60.0
"""Seconds after which a scenario is ended and has failed."""
PASS, FAIL, NOT_APPLICABLE = "pass", "fail", "n/a"
_COLOURS = {PASS: "green", FAIL: "red", NOT_APPLICABLE: "dim"}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one manager did in one scenario."""

    result: str
    evidence: str


Verdicts = dict[int, dict[str, Verdict]]


def run(managers: Sequence[Manager], numbers: Iterable[int]) -> Verdicts:
    """Every scenario on every manager, one after the other."""
    found: Verdicts = {}
    for number in numbers:
        scenario = SCENARIOS[number]
        found[number] = {}
        for manager in managers:
            verdict = found[number][manager.name] = judge(scenario, manager)
            print(f"{number:2} {scenario.what} · {manager.name}: {verdict.result}: {verdict.evidence}", flush=True)
    return found


def judge(scenario: Scenario, manager: Manager) -> Verdict:
    """One scenario on one manager, within its bound."""
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as folder:
        stage = Stage(manager, Path(folder))
        work = Later(lambda: _perform(scenario, stage))
        try:
            return work.result(LONGEST)
        except TimeoutError:
            for running in stage.started:
                for process in [*running.tree(), running.program.process]:
                    process.kill()  # its thread sees that and comes to an end
            work.result(LONGEST)
            return Verdict(FAIL, f"not done after {LONGEST:g} s")


def _perform(scenario: Scenario, stage: Stage) -> Verdict:
    """In a thread of its own, which also ends what it started: programs end with the thread that started them."""
    try:
        with stage.stack:
            return Verdict(PASS, scenario.case(stage))
    except NotApplicable as reason:
        return Verdict(NOT_APPLICABLE, str(reason))
    except (Fails, BenchmarkError, TimeoutError) as reason:
        return Verdict(FAIL, " ".join(str(reason).split())[:300])
    except Exception as error:
        traceback.print_exc()
        return Verdict(FAIL, f"{type(error).__name__}: {error}"[:300])


def show(verdicts: Verdicts) -> None:
    """Print the table."""
    names = list(next(iter(verdicts.values())))
    table = Table(title="Scenarios", title_justify="left", show_lines=True)
    table.add_column("", justify="right")
    table.add_column("scenario", max_width=24)
    for name in names:
        table.add_column(name, max_width=52)
    for number, row in verdicts.items():
        cells = (f"[{_COLOURS[row[name].result]}]{row[name].result}[/] {row[name].evidence}" for name in names)
        table.add_row(str(number), SCENARIOS[number].what, *cells)
    Console(width=None if Console().is_terminal else 140).print(table)
