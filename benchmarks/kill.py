"""`make bench-kill`: kill -9 of the daemon at random moments under load, and a new one on the same state at once.

Every process that was ever seen below a daemon is remembered. Once the next daemon has answered its first request, each
of them must have ended, or be one that it adopted (`supervisor.adopt`, on in some rounds) and that answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any

import psutil

from common import results
from common.arms import write_configuration
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import percentile
from common.wire import BenchmarkError
from pagein import __version__
from storm.daemon import Daemon, call, get, new_session, runs
from storm.requests import Plan, perform
from storm.setting import BUDGET, CHARACTERS, SETTINGS, entry

MODELS = ("plain", "second", "slow", "stubborn", "forking")
CLIENTS = 6
MARK = "BENCH_MARK"
"""A variable that every process of a round inherits, so that one that nobody saw is found all the same."""
ENDED_WITHIN = 5.0
"""Seconds that what the killed daemon left may take to end once the next one serves."""


def main() -> int:
    """Run, print, write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as folder:
        rounds = Rounds(Path(folder), told.seed)
        try:
            asyncio.run(rounds.run(told.rounds))
        finally:
            rounds.clean_up()
    rows = make_rows(rounds)
    results.show(f"Kill: {told.rounds} rounds, seed {told.seed}", rows)
    print("; ".join(f"{what}: {count}" for what, count in sorted(rounds.counts.items())))
    for fault in rounds.faults:
        print(fault, file=sys.stderr)
    if not told.check:
        setup = {"pagein": __version__, "rounds": told.rounds, "seed": told.seed, "clients": CLIENTS}
        setup |= {"models": list(MODELS), "counts": dict(sorted(rounds.counts.items()))}
        print(f"\nwritten to {results.write('kill', setup, rows, host)}")
    return 1 if rounds.faults else 0


def read_arguments() -> argparse.Namespace:
    """How often, with which seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="how often the daemon is killed (default 50)")
    parser.add_argument("--seed", type=int, default=1, help="what chance begins with (default 1)")
    parser.add_argument("--check", action="store_true", help="judge only, write no result")
    return parser.parse_args()


class Rounds:
    """One daemon after the other on one state folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._file = folder / "pagein.yaml"
        self._chance = Random(f"kill-{seed}")
        self._mark = uuid.uuid4().hex
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.restarts: list[float] = []
        self._known: set[psutil.Process] = set()

    async def run(self, rounds: int) -> None:
        """Start, load, kill; then look at what is left once the next one serves."""
        left: list[psutil.Process] = []
        for number in range(rounds + 1):
            adopt = number % 4 in (1, 2)  # both of a pair must wish it; an odd one ends what the other left
            daemon = self._start(adopt)
            if number:
                await self._judge(number, daemon, left)
            if number == rounds:
                daemon.signal(signal.SIGTERM)
                await asyncio.to_thread(daemon.program.wait, 30)
                return
            left = await self._load_and_kill(daemon)

    def _start(self, adopt: bool) -> Daemon:
        models = {c.name: entry(c) for c in CHARACTERS if c.name in MODELS}
        supervisor = SETTINGS["supervisor"] | {"adopt": adopt, "adopt_wait": "10s"}
        write_configuration(self._file, models, BUDGET, SETTINGS | {"supervisor": supervisor})
        began = time.monotonic()
        daemon = Daemon(self._file, {MARK: self._mark})
        self.restarts.append(time.monotonic() - began)
        return daemon

    async def _load_and_kill(self, daemon: Daemon) -> list[psutil.Process]:
        """Clients ask; at a random moment the daemon is killed. Returns what it had started and what runs then."""
        clients = [asyncio.create_task(self._client(daemon)) for _ in range(CLIENTS)]
        until = time.monotonic() + self._chance.uniform(0.05, 4.0)
        while time.monotonic() < until:
            self._known |= set(daemon.alive())
            await asyncio.sleep(0.01)
        self._known |= set(daemon.alive())
        daemon.signal(signal.SIGKILL)
        await asyncio.to_thread(daemon.program.wait, 10)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        self._known |= set(marked(self._mark))
        return [process for process in self._known if runs(process)]

    async def _client(self, daemon: Daemon) -> None:
        async with new_session() as session:
            while True:
                plan = Plan(self._chance.choice(MODELS), False, True, self._chance.randint(1, 30), None, None)
                await perform(session, daemon.url(""), plan)
                await asyncio.sleep(0.02)

    async def _judge(self, number: int, daemon: Daemon, left: list[psutil.Process]) -> None:
        """The next daemon serves; then nothing is left but what it adopted."""
        self.counts["processes that outlived a kill for a moment"] += len(left)
        async with new_session() as session:
            for name in [
                name for pid, name in (await workers(session, daemon)).items() if pid in {p.pid for p in left}
            ]:
                self.counts["workers adopted"] += 1
                await self._must_answer(number, session, daemon, name)
            await self._must_answer(number, session, daemon, "plain")
            deadline = time.monotonic() + ENDED_WITHIN
            while survivors := strangers(left, await workers(session, daemon)):
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.05)
        for process in survivors:
            self.counts["survivors"] += 1
            told = " ".join(process.cmdline())[-120:] if runs(process) else "it ended just now"
            self.faults.append(f"round {number}: {process.pid} of the killed daemon lives: {told}")
            process.kill()

    async def _must_answer(self, number: int, session: Any, daemon: Daemon, name: str) -> None:
        body = {"model": name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
        status, said = await call(session, "POST", daemon.url("/v1/chat/completions"), body)
        if status != 200:
            self.faults.append(f"round {number}: {name} answered {status} {str(said)[:300]}")

    def clean_up(self) -> None:
        """Whatever went wrong: nothing that was started here stays."""
        for process in {*self._known, *marked(self._mark)}:
            if runs(process):
                process.kill()


async def workers(session: Any, daemon: Daemon) -> dict[int, str]:
    """The processes that the daemon calls its workers, with their models."""
    status = await get(session, daemon.url("/api/status"))
    return {model["pid"]: model["name"] for model in status["models"] if model["pid"] is not None}


def strangers(left: list[psutil.Process], workers: Mapping[int, str]) -> list[psutil.Process]:
    """Those that run and are neither a worker nor below one."""
    found = []
    for process in left:
        with contextlib.suppress(psutil.Error):
            family = {process.pid, *(parent.pid for parent in process.parents())}
            if runs(process) and not family & workers.keys():
                found.append(process)
    return found


def marked(mark: str) -> list[psutil.Process]:
    """Every process of this machine that inherited the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def make_rows(rounds: Rounds) -> list[Row]:
    """What is judged."""
    return [
        row("kills of the daemon", "", len(rounds.restarts) - 1),
        row("processes that outlived their daemon", "", rounds.counts["survivors"], at_most=0),
        row("other faults after a restart", "", len(rounds.faults) - rounds.counts["survivors"], at_most=0),
        row("workers adopted, each of which answers", "", rounds.counts["workers adopted"]),
        row("start of a daemon, median", "s", percentile(rounds.restarts, 0.5)),
        row("start of a daemon, slowest", "s", max(rounds.restarts)),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-kill: {error}", file=sys.stderr)
        sys.exit(2)
