"""`make bench-gateway`: what Pagein's door costs, beside llama-server's router and nginx as a plain reverse proxy.

Three kinds of requests: small embeddings and streamed chat on a real engine, and embeddings from a server that answers
at once, which isolates the door from the engine. Every arm has an engine of its own behind it: the same llama-server
with the same settings, which is checked on the running processes. The arms take turns request by request (latency),
and in short blocks (rates), so that what else the machine does hits all alike.
"""

from __future__ import annotations

import itertools
import re
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arms, results
from common.arms import INSTANT, Arm
from common.engine import EngineModel, check_same, engine_in, find_llama_server, settings_of, version_of
from common.load import rate
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import median, percentile, quartiles
from common.weights import choose_weights
from common.wire import BenchmarkError, Connection, Exchange, Target, post
from pagein import __version__

CLIENTS = (1, 8)
PARALLEL = 8
CONTEXT = 512
ADDED_BELOW_MS = 2.0
ROUTER = "llama-server router"


Arms = dict[str, dict[str, Arm]]
"""Of each model, the arms by name."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request, and how long it is measured."""

    name: str
    model: str
    path: str
    body: Mapping[str, Any]
    seconds: float
    """Of the latency part."""
    rate_rounds: int
    rate_seconds: float

    def target(self, arm: Arm) -> Target:
        """This request to that arm."""
        return post(arm.address, self.path, {"model": self.model, **self.body})


EMBEDDING = Kind(
    "embedding",
    "embed",
    "/v1/embeddings",
    {"input": "The quick brown fox."},
    seconds=24.0,
    rate_rounds=5,
    rate_seconds=1.0,
)
CHAT = Kind(
    "streamed chat",
    "chat",
    "/v1/chat/completions",
    {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    seconds=45.0,
    rate_rounds=4,
    rate_seconds=1.5,
)
AT_ONCE = Kind(
    "embedding from a server that answers at once",
    "instant",
    "/v1/embeddings",
    {"input": "The quick brown fox."},
    seconds=8.0,
    rate_rounds=4,
    rate_seconds=0.5,
)
KINDS = (EMBEDDING, CHAT, AT_ONCE)


@dataclass(slots=True)
class Series:
    """What one arm gave for one kind of request: milliseconds, round by round."""

    first: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)

    def add(self, exchange: Exchange) -> None:
        """One request."""
        self.first.append(exchange.first * 1000)
        self.whole.append(exchange.whole * 1000)


def main() -> int:
    """Run all kinds on all arms, print and write the result."""
    end_on_sigterm()
    host = results.describe_host()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as folder:
        program = find_llama_server()
        weights = choose_weights(program)
        print(f"engine {program.rpartition('/')[2]} {version_of(program)}, {weights.told}", flush=True)
        with running_arms(program, weights.path, Path(folder)) as (running, engines):
            setup = describe(program, weights.told, running, engines)
            for kind in KINDS:
                rows += measure(kind, running[kind.model], setup)
    results.show("Gateway", rows)
    print(f"\nwritten to {results.write('gateway', setup, rows, host)}")
    return 0


@contextmanager
def running_arms(
    program: str, weights: Path, folder: Path
) -> Iterator[tuple[dict[str, dict[str, Arm]], dict[str, Any]]]:
    """Start everything; yields the arms of each model by name, and the settings that all engines have."""
    chat = EngineModel("chat", weights, CONTEXT, PARALLEL)
    embed = EngineModel("embed", weights, CONTEXT, PARALLEL, {"embedding": True, "pooling": "mean"})
    with ExitStack() as stack:
        start = stack.enter_context
        running: Arms = {"chat": {}, "embed": {}, "instant": {}}
        for name, arm in start_bare("direct", program, [chat, embed], folder, stack).items():
            running[name]["direct"] = arm
        ours = start(arms.pagein(configuration(program, [chat, embed]), folder))
        theirs = start(arms.router(program, [chat, embed], folder, most=2))
        for each in running.values():
            each["Pagein"] = ours
        for name in ("chat", "embed"):
            running[name][ROUTER] = theirs
        server = arms.find_nginx()
        if server is None:
            print("nginx is not installed: its rows are left out", file=sys.stderr)
        else:
            behind = start_bare("behind-nginx", program, [chat, embed], folder, stack)
            for name, door in start(arms.nginx(server, behind, folder)).items():
                running[name]["nginx"] = door
        warm_up(running)
        yield running, {model.name: compare_engines(model, running[model.name]) for model in (chat, embed)}


def start_bare(label: str, program: str, models: list[EngineModel], folder: Path, stack: ExitStack) -> dict[str, Arm]:
    """Bare servers for one arm. No arm shares an engine: one that is asked twice as often is the faster for it."""
    home = folder / label
    home.mkdir()
    bare = {model.name: stack.enter_context(arms.direct(program, model, home)) for model in models}
    return {**bare, "instant": stack.enter_context(arms.instant(home))}


def configuration(program: str, models: list[EngineModel]) -> dict[str, Any]:
    """Pagein's models: the engines, and the server that answers at once."""
    command = {
        "command": f"{sys.executable} {INSTANT} --socket ${{socket}}",
        "capabilities": ["embedding"],
        "parallel": PARALLEL,
    }
    return {**{model.name: model.entry(program) for model in models}, "instant": command}


def warm_up(running: Mapping[str, Mapping[str, Arm]]) -> None:
    """Load everything, answer a few requests, and make sure that every engine then takes the prompt from its cache."""
    for kind in KINDS:
        for name, arm in running[kind.model].items():
            connection, target = Connection(arm.address), kind.target(arm)
            for _ in range(5):
                said = connection.ask(target.request).answer.body
            connection.close()
            if kind is CHAT and not re.search(rb'"cached_tokens":\s*[1-9]', said):
                raise BenchmarkError(f"{name} does not reuse the prompt: {said[-500:]!r}")


def compare_engines(model: EngineModel, running: Mapping[str, Arm]) -> dict[str, str | None]:
    """Make sure that the engines of all arms are set up alike."""
    found = {
        name: engine_in(running[name].program.descendants(), model.path, model.name) for name in ("Pagein", ROUTER)
    }
    found["direct"] = running["direct"].program.process
    if (door := running.get("nginx")) is not None and door.behind is not None:
        found["nginx"] = door.behind.process
    return check_same({name: settings_of(process) for name, process in found.items()})


def measure(kind: Kind, running: Mapping[str, Arm], setup: dict[str, Any]) -> list[Row]:
    """Latency, then rates, of one kind of request."""
    print(f"{kind.name}: latency for {kind.seconds:.0f} s …", flush=True)
    series = latency(kind, running)
    seconds = len(CLIENTS) * len(running) * kind.rate_rounds * kind.rate_seconds
    print(f"{kind.name}: rates for {seconds:.0f} s …", flush=True)
    rates = {clients: throughput(kind, running, clients) for clients in CLIENTS}
    direct = series["direct"]
    parts = ["first", "whole"] if kind.body.get("stream") else ["whole"]
    setup["kinds"][kind.name] = {
        "requests_per_arm": len(direct.whole),
        "direct_ms": {part: [round(each, 3) for each in quartiles(getattr(direct, part))] for part in parts},
    }
    rows = [each for part in parts for each in added_rows(kind, part, series)]
    return rows + [each for clients in CLIENTS for each in rate_rows(kind, clients, rates[clients])]


def latency(kind: Kind, running: Mapping[str, Arm]) -> dict[str, Series]:
    """Rounds of one request to each arm in turn, in another order each time."""
    series = {name: Series() for name in running}
    connections = {name: Connection(arm.address) for name, arm in running.items()}
    targets = {name: kind.target(arm) for name, arm in running.items()}
    orders = itertools.cycle(turns(list(running)))
    until = time.monotonic() + kind.seconds
    while time.monotonic() < until:
        for name in next(orders):
            series[name].add(connections[name].ask(targets[name].request))
    for connection in connections.values():
        connection.close()
    return series


def throughput(kind: Kind, running: Mapping[str, Arm], clients: int) -> dict[str, float]:
    """Median over short blocks that take turns."""
    found: dict[str, list[float]] = {name: [] for name in running}
    for order in itertools.islice(itertools.cycle(turns(list(running))), kind.rate_rounds):
        for name in order:
            found[name].append(rate(kind.target(running[name]), clients, kind.rate_seconds))
    return {name: median(rates) for name, rates in found.items()}


def turns(names: list[str]) -> list[list[str]]:
    """Orders in which each arm follows each other one about as often: forwards and backwards, from every place."""
    rotated = [names[n:] + names[:n] for n in range(len(names))]
    return [order for each in rotated for order in (each, each[::-1])]


def added_rows(kind: Kind, part: str, series: Mapping[str, Series]) -> list[Row]:
    """What each door adds to the direct way."""
    samples: dict[str, list[float]] = {name: getattr(each, part) for name, each in series.items()}
    where = {"first": ", time to first byte", "whole": ", whole answer" if kind.body.get("stream") else ""}[part]
    peers = [name for name in samples if name not in ("direct", "Pagein")]

    def typical(name: str) -> float:
        return median([a - b for a, b in zip(samples[name], samples["direct"], strict=True)])

    def slowest(name: str) -> float:
        return percentile(samples[name], 0.99) - percentile(samples["direct"], 0.99)

    rows = []
    for said, added, below in (("p50", typical, ADDED_BELOW_MS), ("p99", slowest, None)):
        what = f"{kind.name}{where}: added {said}"
        for peer in peers:
            goal = below if peer == peers[0] else None
            rows.append(row(what, "ms", added("Pagein"), added(peer), peer, below=goal))
    return rows


def rate_rows(kind: Kind, clients: int, rates: Mapping[str, float]) -> list[Row]:
    """Requests per second beside each peer; the router is the one to reach."""
    what = f"{kind.name}: requests per second, {clients} client{'s' if clients > 1 else ''}"
    peers = [name for name in rates if name != "Pagein"]
    return [
        row(what, "1/s", rates["Pagein"], rates[peer], peer, ratio_at_least=1.0 if peer == ROUTER else None)
        for peer in peers
    ]


def describe(program: str, weights: str, running: Mapping[str, Any], engines: Mapping[str, Any]) -> dict[str, Any]:
    """The set-up beside the numbers."""
    return {
        "pagein": __version__,
        "llama_server": version_of(program),
        "nginx": arms.version_of_nginx(),
        "weights": weights,
        "client": "one process, raw sockets, kept connections; latency: arms take turns request by request; "
        "rates: arms take turns in short blocks, median of the blocks",
        "added": "p50: median of the differences to the direct request of the same round; "
        "p99: p99 of the arm - p99 of direct",
        "direct_ms": "quartiles of the direct requests",
        "engine_settings": dict(engines),
        "kinds": {},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-gateway: {error}", file=sys.stderr)
        sys.exit(1)
