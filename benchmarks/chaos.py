"""`make bench-chaos`: random requests, disconnects, kills, lies, edits and foreign memory against a real daemon.

Ten kinds of fake engines, a budget for two. Clients ask and leave at random; a random worker is killed with -9; the
liar takes more than it declared; the configuration is edited, sometimes wrongly, and reloaded; other programs take
memory, or ask for it. An observer outside judges throughout, and once more when everything is calm; a broken rule is
printed with the seed and the last events, and the exit code is 1. The seed fixes what is done, not how long the
machine takes for it.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from common import results
from common.arms import write_configuration
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from storm.clients import Crowd
from storm.daemon import Daemon
from storm.ending import Ending
from storm.faults import Faults
from storm.log import Log
from storm.observer import Observer
from storm.report import Outcome, describe, rows
from storm.setting import BUDGET, models, settings

CLIENTS = 10
FIRST_PART = 60.0
"""Seconds after which the daemon must have all that it needs; at most a third of the run."""


def main() -> int:
    """Run, judge, print, write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    log = Log()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as folder:
        file = Path(folder) / "pagein.yaml"
        write_configuration(file, models(), BUDGET, settings(told.limits))
        daemon = Daemon(file)
        with daemon.program:
            outcome = asyncio.run(storm(daemon, log, told))
        log_of_daemon = daemon.program.last_output()
    judged = rows(log, outcome)
    results.show(f"Chaos: {told.seconds} s, seed {told.seed}", judged)
    print("; ".join(f"{what}: {count}" for what, count in sorted(log.counts.items())))
    if not told.check:
        print(f"\nwritten to {results.write('chaos', describe(log, outcome, told.limits), judged, host)}")
    if log.violations:
        print_evidence(log, told.seed, log_of_daemon)
    return 1 if log.violations else 0


def read_arguments() -> argparse.Namespace:
    """How long, with which seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="length of the storm (default 600)")
    parser.add_argument("--seed", type=int, default=1, help="what chance begins with (default 1)")
    parser.add_argument("--limits", default="auto", choices=("auto", "watchdog"), help="`supervisor.limits`")
    parser.add_argument("--check", action="store_true", help="judge only, write no result")
    return parser.parse_args()


async def storm(daemon: Daemon, log: Log, told: argparse.Namespace) -> Outcome:
    """Everything at once, with a calm moment after the first part and one at the end."""
    watch, calm = Observer(daemon, log), Ending(daemon, log)
    crowd = Crowd(daemon, log, str(told.seed), CLIENTS)
    first = min(FIRST_PART, told.seconds / 3)
    watch.start()
    try:
        crowd.start()
        readings = []
        for part, seconds in enumerate((first, told.seconds - first)):
            faults = Faults(daemon, log, f"{told.seed}-{part}", settings(told.limits))
            faults.start()
            crowd.go_on()
            await _pass(seconds, daemon)
            await faults.stop()
            await crowd.rest()
            await calm.drain()
            await calm.agree()
            await calm.unload_all()
            readings.append(await watch.at_rest())
            log.event(f"at rest: {readings[-1]}")
        await calm.serve()
        await crowd.stop()
    finally:
        await watch.stop()
    code = await calm.end()
    return Outcome(told.seconds, told.seed, first, watch, crowd, readings[0], readings[1], code)


async def _pass(seconds: float, daemon: Daemon) -> None:
    """Let time pass while the daemon lives; raises BenchmarkError when it ends by itself."""
    deadline = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.2)
        if daemon.program.returncode is not None:
            raise BenchmarkError(f"the daemon ended by itself:\n{daemon.program.last_output()}")


def print_evidence(log: Log, seed: int, log_of_daemon: str) -> None:
    """What was broken, with what led to it."""
    out = sys.stderr
    print(f"\nthe daemon's log ends with\n{log_of_daemon}\n\nlast events", *list(log.events)[-60:], sep="\n", file=out)
    print(f"\nbroken with --seed {seed}:", file=out)
    for rule, evidence in log.violations.items():
        print(f"- {rule}: {len(evidence)} times", *(f"    {text}" for text in evidence[:5]), sep="\n", file=out)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-chaos: {error}", file=sys.stderr)
        sys.exit(2)
