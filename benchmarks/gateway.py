"""`make bench-gateway`: what Pagein's door costs, beside llama-server's router and nginx as a plain reverse proxy.

Three kinds of requests: small embeddings and streamed chat on a real engine, and embeddings from a server that answers
at once, which isolates the door from the engine. Every arm has the same llama-server with the same settings behind it,
which is checked on the running processes. The arms take turns request by request (latency), and in short blocks
(rates), so that what else the machine does hits all alike.
"""

from __future__ import annotations

import itertools
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
from common.stats import median, percentile
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
    blocks: int
    block_seconds: float
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
    blocks=5,
    block_seconds=6.0,
    rate_rounds=3,
    rate_seconds=1.5,
)
CHAT = Kind(
    "streamed chat",
    "chat",
    "/v1/chat/completions",
    {
        "messages": [{"role": "user", "content": "Name a colour."}],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    },
    blocks=5,
    block_seconds=8.0,
    rate_rounds=3,
    rate_seconds=2.5,
)
AT_ONCE = Kind(
    "embedding from a server that answers at once",
    "instant",
    "/v1/embeddings",
    {"input": "The quick brown fox."},
    blocks=5,
    block_seconds=2.0,
    rate_rounds=3,
    rate_seconds=1.0,
)
KINDS = (EMBEDDING, CHAT, AT_ONCE)


@dataclass(slots=True)
class Series:
    """What one arm gave for one kind of request: milliseconds, block by block."""

    first: list[list[float]] = field(default_factory=list)
    whole: list[list[float]] = field(default_factory=list)

    def begin_block(self) -> None:
        """What follows belongs to a new block."""
        self.first.append([])
        self.whole.append([])

    def add(self, exchange: Exchange) -> None:
        """One request."""
        self.first[-1].append(exchange.first * 1000)
        self.whole[-1].append(exchange.whole * 1000)


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
        alone = {
            "chat": start(arms.direct(program, chat, folder)),
            "embed": start(arms.direct(program, embed, folder)),
            "instant": start(arms.instant(folder)),
        }
        ours = start(arms.pagein(configuration(program, [chat, embed]), folder))
        theirs = start(arms.router(program, [chat, embed], folder, most=2))
        running = {name: {"direct": arm, "Pagein": ours} for name, arm in alone.items()}
        for model in ("chat", "embed"):
            running[model][ROUTER] = theirs
        server = arms.find_nginx()
        if server is None:
            print("nginx is not installed: its rows are left out", file=sys.stderr)
        else:
            doors = start(arms.nginx(server, {name: arm.address for name, arm in alone.items()}, folder))
            for name, door in doors.items():
                running[name]["nginx"] = door
        warm_up(running)
        yield running, {model.name: compare_engines(model, running[model.name]) for model in (chat, embed)}


def configuration(program: str, models: list[EngineModel]) -> dict[str, Any]:
    """Pagein's models: the engines, and the server that answers at once."""
    command = {
        "command": f"{sys.executable} {INSTANT} --socket ${{socket}}",
        "capabilities": ["embedding"],
        "parallel": PARALLEL,
    }
    return {**{model.name: model.entry(program) for model in models}, "instant": command}


def warm_up(running: Mapping[str, Mapping[str, Arm]]) -> None:
    """Load everything, and answer a few requests."""
    for kind in KINDS:
        for arm in running[kind.model].values():
            connection, target = Connection(arm.address), kind.target(arm)
            for _ in range(5):
                connection.ask(target.request)
            connection.close()


def compare_engines(model: EngineModel, running: Mapping[str, Arm]) -> dict[str, str | None]:
    """Make sure that the engines of all arms are set up alike."""
    trees = {name: arm.program for name, arm in running.items() if name in ("Pagein", ROUTER)}
    found = {name: engine_in(tree.descendants(), model.path, model.name) for name, tree in trees.items()}
    found["direct"] = running["direct"].program.process
    return check_same({name: settings_of(process) for name, process in found.items()})


def measure(kind: Kind, running: Mapping[str, Arm], setup: dict[str, Any]) -> list[Row]:
    """Latency, then rates, of one kind of request."""
    print(f"{kind.name}: latency for {kind.blocks * kind.block_seconds:.0f} s …", flush=True)
    series = latency(kind, running)
    print(
        f"{kind.name}: rates for {len(CLIENTS) * len(running) * kind.rate_rounds * kind.rate_seconds:.0f} s …",
        flush=True,
    )
    rates = {clients: throughput(kind, running, clients) for clients in CLIENTS}
    direct = series["direct"]
    setup["kinds"][kind.name] = {
        "requests_per_arm": sum(map(len, direct.whole)),
        "blocks": kind.blocks,
        "direct_p50_ms": round(pooled(direct.whole, 0.5), 3),
        "direct_p50_ms_by_block": [round(median(block), 3) for block in direct.whole],
        "direct_requests_per_second": {str(n): round(by_arm["direct"], 1) for n, by_arm in rates.items()},
    }
    parts = ["first", "whole"] if kind.body.get("stream") else ["whole"]
    rows = [each for part in parts for each in added_rows(kind, part, series)]
    return rows + [each for clients in CLIENTS for each in rate_rows(kind, clients, rates[clients])]


def latency(kind: Kind, running: Mapping[str, Arm]) -> dict[str, Series]:
    """One request to each arm in turn, the first one of a round another each time."""
    series = {name: Series() for name in running}
    connections = {name: Connection(arm.address) for name, arm in running.items()}
    targets = {name: kind.target(arm) for name, arm in running.items()}
    orders = itertools.cycle(turns(list(running)))
    for _ in range(kind.blocks):
        for each in series.values():
            each.begin_block()
        until = time.monotonic() + kind.block_seconds
        while time.monotonic() < until:
            for name in next(orders):
                series[name].add(connections[name].ask(targets[name].request))
    for name, connection in connections.items():
        connection.close()
        print(name, "opened", connection.opened)
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


def pooled(blocks: list[list[float]], share: float) -> float:
    """A percentile over all blocks."""
    return percentile(list(itertools.chain.from_iterable(blocks)), share)


def added_rows(kind: Kind, part: str, series: Mapping[str, Series]) -> list[Row]:
    """What each door adds to the direct way: the median of the blocks' differences (p50), of all samples (p99)."""
    blocks: dict[str, list[list[float]]] = {name: getattr(each, part) for name, each in series.items()}
    where = {"first": ", time to first byte", "whole": ", whole answer" if kind.body.get("stream") else ""}[part]

    def added(name: str, share: float) -> float:
        if share == 0.5:
            return median([median(a) - median(b) for a, b in zip(blocks[name], blocks["direct"], strict=True)])
        return pooled(blocks[name], share) - pooled(blocks["direct"], share)

    rows = []
    for share in (0.5, 0.99):
        what = f"{kind.name}{where}: added p{share * 100:.0f}"
        below = ADDED_BELOW_MS if share == 0.5 else None
        peers = [name for name in blocks if name not in ("direct", "Pagein")]
        rows += [row(what, "ms", added("Pagein", share), added(peer, share), peer, below=below) for peer in peers]
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
        "added": "p50: median over blocks of (median of the arm - median of direct); p99: over all requests, "
        "p99 of the arm - p99 of direct",
        "chat": "8 tokens, prompt cached",
        "engine_settings": dict(engines),
        "kinds": {},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-gateway: {error}", file=sys.stderr)
        sys.exit(1)
