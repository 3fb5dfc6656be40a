"""`make bench-state`: what the next turn of a long conversation costs, by where its KV cache is.

The same turn (a history of N tokens, a new question, an answer of one token) on the same llama-server program:

- never evicted, restored from disk, restored with the model's load before it: Pagein;
- recomputed, and recomputed with the load before it: Pagein with `state: off`, as any manager without saved
  conversations does it;
- llama-server alone, started anew: from the first byte asked, and from the start of the process.

Before a restore the snapshots are dropped from the system's page cache, so that they come from the disk. What each
answer really computed is read from the engine's own counters and checked.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import arms, results
from common.arms import Arm
from common.engine import EngineModel, check_same, engine_in, find_llama_server, settings_of, version_of
from common.process import end_on_sigterm
from common.results import Row, row
from common.stats import median
from common.weights import choose_weights
from common.wire import BenchmarkError, Connection, Exchange, post
from pagein import __version__

Message = dict[str, str]
MODEL = "chat"
SIZES = (256, 1024, 4096)
LONGEST = 8000
"""As long as 8,192 tokens of context allow, questions and answers included."""
ROUNDS = 5
ROOM = 192
"""Tokens of context beyond the history: template, questions, answers."""
SENTENCE = "In the year {} the keeper of light {} wrote down every ship, its colours and its flag. "
QUESTIONS = ("Which colours were they?", "Who saw them first?", "What was written down?", "Why was it done at all?")
OTHER = [{"role": "user", "content": "Name a colour."}]
SAVED_WITHIN = 20.0
LONGEST_PREFILL = 1800.0
GOAL_AT = 4096
PLAIN, BARE = "Pagein, state off: recomputed", "llama-server alone, after a restart"


@dataclass(slots=True)
class Costs:
    """What one size of history gave, one number per round: seconds to the first token, seconds to leave, bytes."""

    never: list[float] = field(default_factory=list)
    restored: list[float] = field(default_factory=list)
    restored_load: list[float] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    recomputed_load: list[float] = field(default_factory=list)
    alone: list[float] = field(default_factory=list)
    alone_start: list[float] = field(default_factory=list)
    leave_saving: list[float] = field(default_factory=list)
    leave_plain: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    prompt: int = 0
    """Tokens of the whole prompt."""


@dataclass(frozen=True, slots=True)
class Talk:
    """A conversation whose history has so many tokens."""

    history: tuple[Message, ...]

    def asked(self, question: int) -> list[Message]:
        """The next turn, with one of some questions."""
        return [*self.history, {"role": "user", "content": QUESTIONS[question]}]


class Side:
    """One server that is asked."""

    def __init__(self, arm: Arm, folder: Path | None = None) -> None:
        self.arm, self._connection = arm, Connection(arm.address, LONGEST_PREFILL)
        self.snapshots = folder
        self.prompt = 0
        """Tokens of the last prompt."""

    def ask(self, messages: list[Message], computed: tuple[int, int], load: bool | None = None) -> float:
        """Seconds to the first token; so many tokens must have been computed, and a load must have been or not."""
        body = {"model": MODEL, "messages": messages, "max_tokens": 1, "temperature": 0}
        exchange = self._connection.ask(post(self.arm.address, "/v1/chat/completions", body).request)
        was, headers = computed_of(exchange), exchange.answer.headers
        self.prompt = json.loads(exchange.answer.body)["usage"]["prompt_tokens"]
        if not computed[0] <= was <= computed[1]:
            told = headers.get("x-pagein-restore-miss", "no reason told")
            raise BenchmarkError(f"{self.arm.name}: {was} tokens were computed, expected {computed} ({told})")
        if load is not None and ("x-pagein-load-ms" in headers) != load:
            raise BenchmarkError(f"{self.arm.name}: {'no' if load else 'a'} load went before the answer: {headers}")
        return exchange.whole

    def displace(self) -> None:
        """Another conversation takes the slot, and loads the model where it is not there."""
        self.ask(OTHER, (1, 200))

    def unload(self) -> float:
        """Seconds until the model is gone."""
        began = time.perf_counter()
        self._connection.ask(post(self.arm.address, f"/api/models/{MODEL}/unload", {}).request)
        while self.arm.ask("/api/status")["models"][0]["pid"] is not None:
            time.sleep(0.005)
        return time.perf_counter() - began

    def files(self) -> list[Path]:
        """What is saved whole."""
        assert self.snapshots is not None
        return sorted(self.snapshots.glob("*/*.kv"))

    def saved(self, before: Sequence[Path]) -> Path:
        """Wait for a snapshot that was not there before; returns the largest of them."""
        deadline = time.monotonic() + SAVED_WITHIN
        while not (new := [path for path in self.files() if path not in before]):
            if time.monotonic() > deadline:
                raise BenchmarkError(f"nothing was saved within {SAVED_WITHIN:.0f} s")
            time.sleep(0.01)
        return max(new, key=lambda path: path.stat().st_size)

    def drop_from_cache(self) -> None:
        """Let the snapshots be read from the disk next time."""
        for path in self.files():
            drop(path)

    def cut(self, lines: Sequence[str], tokens: int) -> str:
        """The first lines that have about so many tokens together."""
        count = tokens // 20
        for _ in range(3):  # each time nearer: later lines are longer
            body = {"content": "".join(lines[:count])}
            told = self._connection.ask(post(self.arm.address, "/tokenize", body).request).answer.body
            count = round(count * tokens / len(json.loads(told)["tokens"]))
        return "".join(lines[:count])

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def main() -> int:
    """Run, print and write."""
    end_on_sigterm()
    told = read_arguments()
    sizes = [*told.sizes, LONGEST] if told.long else told.sizes
    host = results.describe_host()
    with tempfile.TemporaryDirectory(prefix="pagein-bench-", dir=told.folder) as name:
        program = find_llama_server()
        weights = choose_weights(program)
        print(f"engine {program.rpartition('/')[2]} {version_of(program)}, {weights.told}", flush=True)
        bench = Bench(program, EngineModel(MODEL, weights.path, max(sizes) + ROOM), Path(name))
        costs = {size: Costs() for size in sizes}
        setup = bench.run(costs, told.rounds)
    setup |= {"weights": weights.told, "rounds": told.rounds, "prompts": {str(n): c.prompt for n, c in costs.items()}}
    rows = [row for size, each in costs.items() for row in make_rows(size, each)]
    results.show("State", rows)
    print(f"\nwritten to {results.write('state', setup, rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds of each size (default {ROUNDS})")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES), help="tokens of history")
    parser.add_argument("--long", action="store_true", help=f"also {LONGEST} tokens: minutes of prefill on a CPU")
    parser.add_argument("--folder", type=Path, help="where temporary files and snapshots go (default: the system's)")
    return parser.parse_args()


class Bench:
    """All arms on one model."""

    def __init__(self, program: str, model: EngineModel, folder: Path) -> None:
        self._program, self._model, self._folder = program, model, folder

    def run(self, costs: dict[int, Costs], rounds: int) -> dict[str, Any]:
        """Round by round, size by size, arm by arm; returns the set-up."""
        with ExitStack() as stack:
            talks = self._talks(costs, rounds)
            entries = {MODEL: self._model.entry(self._program) | {"timeout": LONGEST_PREFILL}}
            kept = stack.enter_context(arms.pagein(entries, self._folder, name="kept"))
            plain = stack.enter_context(arms.pagein(entries, self._folder, name="plain", settings={"state": "off"}))
            ours = Side(kept, self._folder / "kept-state" / "kv" / "snapshots")
            off = Side(plain)
            for side in (ours, off):
                side.displace()
            engines = {
                side.arm.program.name: settings_of(engine_in(side.arm.program.descendants(), self._model.path))
                for side in (ours, off)
            }
            for number in range(rounds):
                for size, each in costs.items():
                    talk = talks[size, number]
                    self._kept(ours, talk, size, each)
                    self._recomputed(off, talk, size, each)
                    self._alone(talk, size, each)
                    print(f"\rround {number + 1} of {rounds}, {size} tokens ", end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            for side in (ours, off):
                side.close()
        return {
            "pagein": __version__,
            "llama_server": version_of(self._program),
            "answer": "1 token",
            "order": "sizes take turns round by round, arms within each",
            "engine_settings": check_same(engines),
        }

    def _talks(self, sizes: Iterable[int], rounds: int) -> dict[tuple[int, int], Talk]:
        """A history of about so many tokens for each size and round, which differ from their first words on."""
        talks = {}
        answer = {"role": "assistant", "content": "Every ship, its colours and its flag."}
        with arms.direct(self._program, self._model, self._folder) as arm:
            side = Side(arm)
            for size in sizes:
                for number in range(rounds):
                    lines = [SENTENCE.format(1000 + number * 97 + size % 89, line) for line in range(size // 8)]
                    text = side.cut(lines, size) + "What was written down?"
                    talks[size, number] = Talk(({"role": "user", "content": text}, answer))
            side.close()
        return talks

    def _kept(self, side: Side, talk: Talk, size: int, costs: Costs) -> None:
        """Never evicted, saved for the eviction, restored with a load, restored without."""
        few, before = (1, 64), side.files()
        side.ask(talk.asked(3), (size // 2, 2 * size))
        costs.prompt = side.prompt
        costs.never.append(side.ask(talk.asked(0), few, load=False))
        costs.leave_saving.append(side.unload())
        file = side.saved(before)
        costs.bytes.append(file.stat().st_size)
        costs.read.append(read_cold(file))
        side.drop_from_cache()
        costs.restored_load.append(side.ask(talk.asked(1), few, load=True))
        before = side.files()
        side.displace()
        side.saved(before)  # the turn before: its save would run beside what is measured
        side.drop_from_cache()
        costs.restored.append(side.ask(talk.asked(2), few, load=False))

    def _recomputed(self, side: Side, talk: Talk, size: int, costs: Costs) -> None:
        """The same turn where nothing is saved."""
        most = (size // 2, 2 * size)
        side.displace()
        costs.recomputed.append(side.ask(talk.asked(2), most, load=False))
        costs.leave_plain.append(side.unload())
        costs.recomputed_load.append(side.ask(talk.asked(1), most, load=True))

    def _alone(self, talk: Talk, size: int, costs: Costs) -> None:
        """A bare server after its restart."""
        began = time.perf_counter()
        with arms.direct(self._program, self._model, self._folder) as arm:
            started = time.perf_counter() - began
            side = Side(arm)
            seconds = side.ask(talk.asked(1), (size // 2, 2 * size))
            side.close()
        costs.alone.append(seconds)
        costs.alone_start.append(started + seconds)


def computed_of(exchange: Exchange) -> int:
    """Tokens of the prompt that the engine says it computed."""
    usage = json.loads(exchange.answer.body)["usage"]
    return int(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])


def drop(path: Path) -> None:
    """Take a file that lies on the disk out of the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_cold(path: Path) -> float:
    """Seconds that reading a file from the disk takes."""
    drop(path)
    began = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(1024 * 1024):
            pass
    return time.perf_counter() - began


def make_rows(size: int, costs: Costs) -> list[Row]:
    """The times beside those of a manager that saves nothing; the issue's goals hold at `GOAL_AT` tokens."""
    never, restored, loaded = median(costs.never), median(costs.restored), median(costs.restored_load)
    again, again_loaded = median(costs.recomputed), median(costs.recomputed_load)
    goal = size == GOAL_AT
    within = float(f"{1.2 * never + median(costs.read):.4g}")
    return [
        row(f"{size} tokens: never evicted", "s", never),
        row(f"{size} tokens: restored", "s", restored, at_most=within if goal else None),
        row(f"{size} tokens: restored", "s", restored, again, PLAIN, ratio_at_most=1 / 50 if goal else None),
        row(f"{size} tokens: load and restore", "s", loaded, again_loaded, PLAIN, ratio_at_most=0.1 if goal else None),
        row(
            f"{size} tokens: restored, beside a restarted server that is ready",
            "s",
            restored,
            median(costs.alone),
            BARE,
        ),
        row(f"{size} tokens: load and restore, beside its start", "s", loaded, median(costs.alone_start), BARE),
        row(
            f"{size} tokens: the model leaves, saving first",
            "s",
            median(costs.leave_saving),
            median(costs.leave_plain),
            PLAIN,
        ),
        row(f"{size} tokens: snapshot", "MB", median(costs.bytes) / 1e6),
        row(f"{size} tokens: reading it from the disk", "s", median(costs.read)),
    ]


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-state: {error}", file=sys.stderr)
        sys.exit(1)
