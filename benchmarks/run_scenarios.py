"""`make bench-scenarios`: the situations that break model managers, run against Pagein and what else installs here.

Each scenario is stated once; an adapter says how a manager is started with so many models, read and ended
(`scenarios/adapters/`). Times are a tenth of the real ones or less, sizes are MiB instead of GB; the page says which.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict

from common import results
from common.process import end_on_sigterm
from common.results import Row
from common.wire import BenchmarkError
from scenarios.adapters import ADAPTERS
from scenarios.contract import Manager
from scenarios.registry import SCENARIOS
from scenarios.runner import NOT_APPLICABLE, PASS, Verdicts, run, show

OURS = "Pagein"


def main() -> int:
    """Run, print, write; the exit code tells whether Pagein passed everything that applies to it."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    managers = [ADAPTERS[name]() for name in told.managers]
    numbers = told.only or sorted(SCENARIOS)
    began = time.monotonic()
    verdicts = run(managers, numbers)
    show(verdicts)
    names = [manager.name for manager in managers]
    if not told.only and OURS in names:
        path = results.write("scenarios", describe(managers, verdicts, time.monotonic() - began), rows(verdicts), host)
        print(f"\nwritten to {path}")
    failed = [n for n, row in verdicts.items() if OURS in row and row[OURS].result not in (PASS, NOT_APPLICABLE)]
    if failed:
        print(f"{OURS} fails {', '.join(map(str, failed))}", file=sys.stderr)
    return 1 if failed else 0


def read_arguments() -> argparse.Namespace:
    """Which managers and which scenarios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--managers", nargs="+", choices=list(ADAPTERS), default=list(ADAPTERS), help="default: all")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="these scenarios; no result is written then")
    return parser.parse_args()


def rows(verdicts: Verdicts) -> list[Row]:
    """1 for a pass, 0 for a fail, null where it does not apply; one row for each peer."""
    found = []
    for number, row in verdicts.items():
        score = {name: None if v.result == NOT_APPLICABLE else float(v.result == PASS) for name, v in row.items()}
        ours = score.pop(OURS)
        for peer, theirs in score.items() or [(None, None)]:
            found.append(Row(f"{number} {SCENARIOS[number].what}", "pass", ours, theirs, peer))
    return found


def describe(managers: list[Manager], verdicts: Verdicts, seconds: float) -> dict[str, object]:
    """The set-up, and the evidence of every verdict."""
    return {
        "managers": {manager.name: manager.about for manager in managers},
        "seconds": round(seconds),
        "rows": "1: pass, 0: fail, null: not applicable",
        "scenarios": [
            {
                "number": number,
                "what": SCENARIOS[number].what,
                "scale": SCENARIOS[number].scale,
                "verdicts": {name: asdict(verdict) for name, verdict in row.items()},
            }
            for number, row in verdicts.items()
        ],
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-scenarios: {error}", file=sys.stderr)
        sys.exit(2)
