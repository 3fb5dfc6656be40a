"""`make bench-compute-lock`: what letting heavy models compute one at a time buys and costs on this machine.

Two daemons alike but for `scheduler.compute_lock`; each holds two chat models marked heavy (the same weights, an engine
each) and a light embedding model. Clients stream from both chat models at once and ask for embeddings beside that. The
daemons take turns in short blocks, so that what else the machine does hits both alike.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arms, results
from common.arms import Arm
from common.engine import EngineModel, check_same, engine_in, find_llama_server, settings_of, version_of
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import median, percentile
from common.weights import choose_weights
from common.wire import BenchmarkError, Connection, post
from pagein import __version__

CONTEXT = 512
TOKENS = 32
CLIENTS = 2
"""Of each chat model."""
BLOCK_SECONDS = 10.0
EMBED_EVERY = 0.5
ON, OFF = "Pagein", "without the lock"


@dataclass(slots=True)
class Samples:
    """What one arm gave over all its blocks."""

    tokens: int = 0
    seconds: float = 0.0
    whole: list[float] = field(default_factory=list)
    """Seconds of each chat, its wait included."""
    first: list[float] = field(default_factory=list)
    """Seconds to its first byte of content or heartbeat."""
    embedding: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


def main() -> int:
    """Run both arms in turns, print and write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as name:
        program = find_llama_server()
        weights = choose_weights(program)
        print(f"engine {program.rpartition('/')[2]} {version_of(program)}, {weights.told}", flush=True)
        models = engine_models(weights.path)
        with running_arms(program, models, Path(name)) as running:
            found = take_turns(running, told.blocks)
            setup = describe(program, weights.told, running, models, told.blocks)
    rows = make_rows(found)
    results.show("Compute lock", rows)
    print(f"\nwritten to {results.write('compute-lock', setup, rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """How many blocks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=6, help=f"blocks of {BLOCK_SECONDS:g} s per arm (default 6)")
    return parser.parse_args()


def engine_models(weights: Path) -> list[EngineModel]:
    """Two that chat and one that embeds, on one file, so that its pages are in memory once."""
    embed = EngineModel("embed", weights, CONTEXT, 1, {"embedding": True, "pooling": "mean"})
    return [EngineModel("a", weights, CONTEXT, CLIENTS), EngineModel("b", weights, CONTEXT, CLIENTS), embed]


@contextmanager
def running_arms(program: str, models: list[EngineModel], folder: Path) -> Iterator[dict[str, Arm]]:
    """Both daemons, with everything loaded."""
    with ExitStack() as stack:
        running = {}
        for number, (name, lock) in enumerate({ON: True, OFF: False}.items()):
            entries = {model.name: model.entry(program) | {"heavy": model.name != "embed"} for model in models}
            settings = {"scheduler": {"compute_lock": lock}}
            key = f"pagein-{number}"
            running[name] = stack.enter_context(arms.pagein(entries, folder, name=key, settings=settings))
            for model in ("a", "b"):
                ask_chat(running[name], model, Samples())
            ask_embedding(running[name], Samples())
        yield running


def take_turns(running: dict[str, Arm], blocks: int) -> dict[str, Samples]:
    """A block on each arm in turn, in the other order each time."""
    found = {name: Samples() for name in running}
    for block in range(blocks):
        for name in list(running)[:: 1 if block % 2 == 0 else -1]:
            run_block(running[name], found[name])
        print(f"\rblock {block + 1} of {blocks}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, samples in found.items():
        if samples.faults:
            raise BenchmarkError(f"{name}: {len(samples.faults)} requests failed, the first: {samples.faults[0]}")
    return found


def run_block(arm: Arm, samples: Samples) -> None:
    """All clients at once for a while; a chat that began in time is waited for."""
    began = time.perf_counter()
    until = began + BLOCK_SECONDS
    lock = threading.Lock()

    def again(ask: Any, *arguments: Any, pause: float = 0.0) -> None:
        while time.perf_counter() < until:
            own = Samples()
            try:
                ask(arm, *arguments, own)
            except (BenchmarkError, OSError) as error:
                own.faults.append(str(error))
            with lock:
                merge(samples, own)
            time.sleep(pause)

    clients = [threading.Thread(target=again, args=(ask_chat, model)) for model in ("a", "b") for _ in range(CLIENTS)]
    clients.append(threading.Thread(target=again, args=(ask_embedding,), kwargs={"pause": EMBED_EVERY}))
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    samples.seconds += time.perf_counter() - began


def merge(samples: Samples, own: Samples) -> None:
    """Add what one request gave."""
    samples.tokens += own.tokens
    for name in ("whole", "first", "embedding", "faults"):
        getattr(samples, name).extend(getattr(own, name))


def ask_chat(arm: Arm, model: str, samples: Samples) -> None:
    """A streamed chat of exactly so many tokens."""
    body = {"model": model, "messages": [{"role": "user", "content": "Tell me about the sea."}], "stream": True}
    body |= {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream_options": {"include_usage": True}}
    connection = Connection(arm.address)
    try:
        exchange = connection.ask(post(arm.address, "/v1/chat/completions", body).request)
    finally:
        connection.close()
    lines = exchange.answer.body.split(b"\n")
    usage = [json.loads(line[6:])["usage"] for line in lines if b'"completion_tokens"' in line]
    if not usage or b"data: [DONE]" not in lines:
        raise BenchmarkError(f"a stream of {model} is not whole: {exchange.answer.body[-300:]!r}")
    samples.tokens += usage[-1]["completion_tokens"]
    samples.whole.append(exchange.whole)
    samples.first.append(exchange.first)


def ask_embedding(arm: Arm, samples: Samples) -> None:
    """A small embedding."""
    connection = Connection(arm.address)
    try:
        body = {"model": "embed", "input": "The quick brown fox."}
        samples.embedding.append(connection.ask(post(arm.address, "/v1/embeddings", body).request).whole)
    finally:
        connection.close()


def make_rows(found: dict[str, Samples]) -> list[Row]:
    """With the lock beside without it."""
    on, off = found[ON], found[OFF]
    rows = [
        row("tokens per second, all streams together", "1/s", on.tokens / on.seconds, off.tokens / off.seconds, OFF)
    ]
    series = {
        f"chat of {TOKENS} tokens, whole": ("whole", "s"),
        "chat, first byte": ("first", "s"),
        "embedding of the light model": ("embedding", "s"),
    }
    for what, (name, unit) in series.items():
        ours, theirs = getattr(on, name), getattr(off, name)
        rows.append(row(f"{what}: p50", unit, median(ours), median(theirs), OFF))
        rows.append(row(f"{what}: p95", unit, percentile(ours, 0.95), percentile(theirs, 0.95), OFF))
    return rows


def describe(
    program: str, weights: str, running: dict[str, Arm], models: list[EngineModel], blocks: int
) -> dict[str, Any]:
    """The set-up beside the numbers; makes sure that the engines of both arms are set up alike."""
    chat = models[0]
    engines = {name: settings_of(engine_in(arm.program.descendants(), chat.path, "a")) for name, arm in running.items()}
    return {
        "pagein": __version__,
        "llama_server": version_of(program),
        "weights": weights,
        "load": f"{CLIENTS} clients on each of 2 heavy chat models, {TOKENS} tokens each; an embedding every "
        f"{EMBED_EVERY:g} s; {blocks} blocks of {BLOCK_SECONDS:g} s per arm, arms in turn",
        "engine_settings": check_same(engines),
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-compute-lock: {error}", file=sys.stderr)
        sys.exit(1)
