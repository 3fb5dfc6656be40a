"""`make bench-swap`: two models and room for one, A→B→A…, beside llama-server's router with `--models-max 1`.

A swap is one request for the model that is not there: from the request to the whole answer of four tokens. Both arms
run the same llama-server with the same settings, which is checked; that each swap really was one is checked too. A
further arm is Pagein with its own engine. The arms take turns swap by swap, so that what else the machine does hits all
alike.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from common import arms, results
from common.arms import Arm
from common.engine import EngineModel, check_same, engine_in, find_llama_server, settings_of, version_of
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import median, percentile
from common.weights import choose_weights, two_copies
from common.wire import BenchmarkError, Connection, post
from pagein import __version__
from pagein.units import format_bytes

CONTEXT = 2048
TOKENS = 4
WARM_UP = 2
ROUTER = "llama-server router"
OWN_ENGINE = "Pagein, its own engine"
ROOM = 1.5
"""Budget for models, in footprints of the larger one: room for one, never for two."""


@dataclass(slots=True)
class Swaps:
    """What one arm gave, seconds; where Pagein says it, also what of it was what."""

    total: list[float] = field(default_factory=list)
    leave: list[float] = field(default_factory=list)
    """Until the other model's memory was back."""
    load: list[float] = field(default_factory=list)
    answer: list[float] = field(default_factory=list)


def main() -> int:
    """Run all arms, print and write the result."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-", dir=told.folder) as name:
        folder = Path(name)
        program = find_llama_server()
        files, said = choose_models(program, told.models, folder)
        print(f"engine {program.rpartition('/')[2]} {version_of(program)}, {said}", flush=True)
        models = [EngineModel(letter, path, CONTEXT) for letter, path in zip("ab", files, strict=True)]
        with running_arms(program, models, folder) as (running, budgets):
            swaps = alternate(running, told.swaps)
            setup = describe(program, said, running, budgets, told.swaps, models[0 if told.swaps % 2 else 1])
    rows = make_rows(swaps)
    results.show("Swap", rows)
    print(f"\nwritten to {results.write('swap', setup, rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--swaps", type=int, default=24, help="swaps of each arm (default 24)")
    parser.add_argument("--models", nargs=2, type=Path, metavar="GGUF", help="two other models")
    parser.add_argument("--folder", type=Path, help="where temporary files go (default: the system's folder)")
    return parser.parse_args()


def choose_models(program: str, named: list[Path] | None, folder: Path) -> tuple[tuple[Path, Path], str]:
    """Two model files, and what to say of them."""
    if named is not None:
        first, second = (path.resolve(strict=True) for path in named)
        sizes = [f"{path.name}, {format_bytes(path.stat().st_size)}" for path in (first, second)]
        return (first, second), " and ".join(sizes)
    weights = choose_weights(program)
    return two_copies(weights.path, folder), f"twice {weights.told}"


@contextmanager
def running_arms(
    program: str, models: list[EngineModel], folder: Path
) -> Iterator[tuple[dict[str, Arm], dict[str, int]]]:
    """Start everything; yields the arms by name, and the budgets of those that have one."""
    budgets: dict[str, int] = {}
    with ExitStack() as stack:
        running: dict[str, Arm] = {}
        for name, server in (("Pagein", program), (OWN_ENGINE, "builtin")):
            entries = {model.name: model.entry(server) for model in models}
            key = name.lower().replace(", ", "-").replace(" ", "-")
            budgets[name] = find_budget(entries, folder, key)
            running[name] = stack.enter_context(arms.pagein(entries, folder, budgets[name], key))
        running[ROUTER] = stack.enter_context(arms.router(program, models, folder, most=1))
        yield running, budgets


def find_budget(entries: Mapping[str, Any], folder: Path, key: str) -> int:
    """Load and use each model once; what they were measured to take says what holds one and never two.

    The peaks are remembered in the state folder, so the next daemon reserves them from its start.
    """
    with arms.pagein(entries, folder, name=key) as arm:
        connection = Connection(arm.address)
        for name in entries:
            ask(connection, arm, name)
        connection.close()
    with arms.pagein(entries, folder, name=key) as arm:
        status = arm.ask("/api/status")
    pool = next(pool for pool in status["pools"] if pool["name"] == "ram")
    largest = max(model["need"]["ram"] for model in status["models"])
    return int(pool["own"] + ROOM * largest)


def ask(connection: Connection, arm: Arm, model: str) -> tuple[float, Mapping[str, str]]:
    """Ask a model for four tokens; returns seconds and the answer's headers."""
    body = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": TOKENS, "temperature": 0}
    exchange = connection.ask(post(arm.address, "/v1/chat/completions", {"model": model, **body}).request)
    return exchange.whole, exchange.answer.headers


def alternate(running: Mapping[str, Arm], count: int) -> dict[str, Swaps]:
    """A swap on each arm in turn."""
    found = {name: Swaps() for name in running}
    connections = {name: Connection(arm.address) for name, arm in running.items()}
    for number in range(WARM_UP + count):
        for name, arm in running.items():
            before = arm.program.descendants()
            seconds, headers = ask(connections[name], arm, "ab"[number % 2])
            check_swapped(name, headers, before, first=number == 0)
            if number >= WARM_UP:
                take(found[name], seconds, headers)
        print(f"\rswap {max(0, number + 1 - WARM_UP)} of {count}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for connection in connections.values():
        connection.close()
    return found


def check_swapped(name: str, headers: Mapping[str, str], before: list[psutil.Process], first: bool) -> None:
    """Raise BenchmarkError unless the other model left for this answer."""
    if name == ROUTER:
        if any(process.is_running() for process in before):
            raise BenchmarkError(f"{name}: the engine of the other model outlived the swap")
    elif "x-pagein-load-ms" not in headers or (not first and "x-pagein-evicted" not in headers):
        raise BenchmarkError(f"{name}: a request did not swap: {dict(headers)}")


def take(swaps: Swaps, seconds: float, headers: Mapping[str, str]) -> None:
    """Note one swap, and what Pagein says about it."""
    swaps.total.append(seconds)
    if "x-pagein-queue-ms" in headers:
        waited, load = (float(headers[f"x-pagein-{what}-ms"]) / 1000 for what in ("queue", "load"))
        swaps.leave.append(waited - load)
        swaps.load.append(load)
        swaps.answer.append(seconds - waited)


def make_rows(swaps: Mapping[str, Swaps]) -> list[Row]:
    """Medians and p90 beside the router, then what Pagein's time goes into."""
    router = swaps[ROUTER].total
    rows = []
    for name in (name for name in swaps if name != ROUTER):
        own = swaps[name]
        what = "swap" if name == "Pagein" else f"swap, {name.partition(', ')[2]}"
        most = 1.0 if name == "Pagein" else None
        rows.append(row(f"{what}: median", "s", median(own.total), median(router), ROUTER, ratio_at_most=most))
        rows.append(row(f"{what}: p90", "s", percentile(own.total, 0.9), percentile(router, 0.9), ROUTER))
        rows.append(row(f"{what}: of it, the other model leaves (median)", "s", median(own.leave)))
        rows.append(row(f"{what}: of it, load (median)", "s", median(own.load)))
        rows.append(row(f"{what}: of it, answer of {TOKENS} tokens (median)", "s", median(own.answer)))
    return rows


def describe(
    program: str,
    weights: str,
    running: Mapping[str, Arm],
    budgets: Mapping[str, int],
    swaps: int,
    last: EngineModel,
) -> dict[str, Any]:
    """The set-up beside the numbers; makes sure that the engines of both arms are set up alike."""
    engines = {
        name: settings_of(engine_in(running[name].program.descendants(), last.path, last.name))
        for name in ("Pagein", ROUTER)
    }
    return {
        "pagein": __version__,
        "llama_server": version_of(program),
        "own_engine": running[OWN_ENGINE].ask("/api/status")["models"][0]["engine_version"],
        "weights": weights,
        "swaps_per_arm": swaps,
        "warm_up": WARM_UP,
        "answer": f"{TOKENS} tokens",
        "room_for": 1,
        "budget": {name: format_bytes(budget) for name, budget in budgets.items()},
        "order": "arms take turns swap by swap",
        "engine_settings": check_same(engines),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-swap: {error}", file=sys.stderr)
        sys.exit(1)
