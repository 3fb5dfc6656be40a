"""`make bench-endurance`: 10,000 requests over five fake models under a budget that holds two.

Sixteen clients ask the five in bursts of chance. Nothing may be lost, nothing may run out of memory, and 99 of 100
requests have their model within the stated bound: each of the three other models that may be asked for before has a
turn of at most patience and residency, with a load each.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from common import results
from common.arms import write_configuration
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import percentile
from common.wire import BenchmarkError
from pagein import __version__
from pagein.units import format_bytes
from storm.daemon import Daemon, get, new_session
from storm.log import Log
from storm.observer import SUM, Observer
from storm.requests import WRONG, End, Plan, perform
from storm.setting import BUDGET, MARGIN, MIB, PATIENCE, SETTINGS, Character, entry

MODELS = tuple(f"model-{letter}" for letter in "abcde")
CLIENTS = 16
BURST = 5
"""Requests that a client has for one model, on average, before it turns to another."""
LOAD = 1.0
"""Seconds that a load with the leaving before it may take on a machine of two busy cores."""
BOUND = (len(MODELS) - 2) * (PATIENCE + LOAD) + LOAD
"""Seconds within which 99 of 100 requests have their model."""


def main() -> int:
    """Run, print, write."""
    end_on_sigterm()
    told = read_arguments()
    host, log = results.describe_host(), Log()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as folder:
        file = Path(folder) / "pagein.yaml"
        models = {name: entry(Character(name, "", 1), queue=CLIENTS) for name in MODELS}
        write_configuration(file, models, BUDGET, SETTINGS)
        daemon = Daemon(file)
        with daemon.program:
            run = Run(daemon, log, told.requests, told.seed)
            asyncio.run(run.run())
    rows = make_rows(run)
    results.show(f"Endurance: {told.requests} requests, seed {told.seed}", rows)
    for evidence in [*run.lost[:10], *log.violations.get(SUM, [])[:5]]:
        print(evidence, file=sys.stderr)
    if not told.check:
        print(f"\nwritten to {results.write('endurance', describe(run, told), rows, host)}")
    return 0 if all(each.met is not False for each in rows) else 1


def read_arguments() -> argparse.Namespace:
    """How many, with which seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000, help="default 10000")
    parser.add_argument("--seed", type=int, default=1, help="what chance begins with (default 1)")
    parser.add_argument("--check", action="store_true", help="judge only, write no result")
    return parser.parse_args()


class Run:
    """All requests, and what became of them."""

    def __init__(self, daemon: Daemon, log: Log, requests: int, seed: int) -> None:
        self._daemon, self._seed = daemon, seed
        self._open = requests
        self.watch = Observer(daemon, log)
        self.requests = requests
        self.ends: Counter[End] = Counter()
        self.waits: list[float] = []
        self.lost: list[str] = []
        self.seconds = 0.0
        self.loads = 0
        self.out_of_memory = 0

    async def run(self) -> None:
        """Ask until all requests were made."""
        began = time.monotonic()
        self.watch.start()
        try:
            await asyncio.gather(*(self._client(number) for number in range(CLIENTS)))
        finally:
            await self.watch.stop()
        self.seconds = time.monotonic() - began
        async with new_session() as session:
            status = await get(session, self._daemon.url("/api/status"))
            told = await get(session, self._daemon.url("/api/decisions?limit=10000"))
        self.loads = sum(model["loads"] for model in status["models"])
        self.out_of_memory = sum(decision["kind"] in ("kill", "failed") for decision in told["decisions"])

    async def _client(self, number: int) -> None:
        chance = Random(f"{self._seed}-{number}")
        model = chance.choice(MODELS)
        async with new_session() as session:
            while self._open > 0:
                self._open -= 1
                if chance.random() < 1 / BURST:
                    model = chance.choice(MODELS)
                embedding = chance.random() < 0.5
                plan = Plan(model, embedding, not embedding and chance.random() < 0.5, 1, None, None)
                ended = await perform(session, self._daemon.url(""), plan)
                self.ends[ended.end] += 1
                if ended.queue_seconds is not None:
                    self.waits.append(ended.queue_seconds)
                if ended.end is not End.ANSWERED:
                    self.lost.append(f"{model}: {ended.end}: {ended.told}")


def make_rows(run: Run) -> list[Row]:
    """What is judged."""
    return [
        row("requests", "", sum(run.ends.values())),
        row("of them answered", "", run.ends[End.ANSWERED]),
        row("lost, refused or wrong", "", len(run.lost), at_most=0),
        row("of them never ended, or ended wrongly", "", sum(run.ends[end] for end in WRONG), at_most=0),
        row("workers ended for memory, or failed", "", run.out_of_memory, at_most=0),
        row("highest measured sum", "MiB", run.watch.highest / MIB, at_most=(BUDGET + MARGIN) / MIB),
        row("wait for the model, median", "s", percentile(run.waits, 0.5)),
        row("wait for the model, p99", "s", percentile(run.waits, 0.99), at_most=BOUND),
        row("wait for the model, longest", "s", max(run.waits)),
        row("loads", "", run.loads),
        row("requests per load", "", sum(run.ends.values()) / max(1, run.loads)),
        row("requests per second", "1/s", sum(run.ends.values()) / run.seconds),
    ]


def describe(run: Run, told: argparse.Namespace) -> dict[str, Any]:
    """The set-up beside the numbers."""
    return {
        "pagein": __version__,
        "seconds": round(run.seconds),
        "seed": told.seed,
        "requests": told.requests,
        "clients": CLIENTS,
        "models": list(MODELS),
        "budget_and_margin": f"budget {format_bytes(BUDGET)} (two models), margin {format_bytes(MARGIN)}",
        "bound": f"{BOUND:g} s = {len(MODELS) - 2} turns of patience ({PATIENCE:g} s) and a load, and its own load",
        "counts": {str(end): count for end, count in run.ends.items()},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-endurance: {error}", file=sys.stderr)
        sys.exit(2)
