"""`make bench-weights`: what a token costs when the model is larger than the memory.

One model of 1.78 billion random weights in real shapes (3.55 GB in bfloat16), one disk, one memory limit that the
kernel holds each arm to, files out of the page cache before each run. Beside Pagein in bfloat16 and in 4 bits: AirLLM,
accelerate's disk offload, oLLM and llama.cpp on mapped files in the same memory, plain transformers where everything
fits, and the raw speed of the disk as the floor under all of them.

Needs root, since only root makes memory groups, and a disk with 15 GB free (`--folder`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from common import disk, results
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from pagein import __version__
from pagein.units import format_bytes, parse_bytes
from weights_models import BLOCKS, Models, make
from weights_peers import running
from weights_peers.cases import GIB, MIB, Case, Setting, all_cases
from weights_peers.outcome import Outcome, rows_of

ROOT = Path(__file__).parents[1]
ROUNDS = 2
TOKENS = 9


def main() -> int:
    """Run, print and write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    models = Models(told.folder, told.blocks)
    make(models)
    setting = Setting(models, told.folder / "arms" / models.path("hf").name, told.memory, told.tight, told.tokens)
    cases = choose(setting, told.only)
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as logs:
        outcome = run(setting, cases, told.rounds, Path(logs))
    rows = rows_of(outcome)
    results.show("Weights", rows)
    if told.only or told.blocks != BLOCKS:
        print("\na part of the benchmark, or of the model: nothing is written")
        return 0
    print(f"\nwritten to {results.write('weights', setup_of(outcome, told.rounds), rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "benchmarks" / "weights"
    parser.add_argument("--folder", type=Path, default=folder, help="where models and copies go (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of all cases (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of each run (default %(default)s)")
    parser.add_argument("--memory", type=parse_bytes, default=3 * GIB // 2, help="the limit (default 1.5GiB)")
    parser.add_argument("--tight", type=parse_bytes, default=700 * MIB, help="less than 4 bits take (700MiB)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="a smaller model, to try something")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some cases, by their names in the output")
    return parser.parse_args()


def choose(setting: Setting, only: Sequence[str] | None) -> list[Case]:
    """The cases that can run here, or those that were named."""
    need, there = setting.ample, psutil.virtual_memory().available
    if need > there:
        print(f"{format_bytes(there)} of memory are free: cases that need {format_bytes(need)} are left out")
    cases = list(all_cases(setting, full=need <= there))
    if only and (unknown := set(only) - {case.key for case in cases}):
        raise BenchmarkError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(c.key for c in cases)}")
    return [case for case in cases if not only or case.key in only]


def run(setting: Setting, cases: Sequence[Case], rounds: int, logs: Path) -> Outcome:
    """Round by round, case by case; the raw speed of the disk is taken before each run of Pagein that streams."""
    outcome = Outcome(setting)
    why_not = _prepare(cases, logs)
    outcome.missing |= {case.key: why for case in cases if (why := why_not[case.arm]) is not None}
    weights = setting.models.files("hf")
    for number in range(rounds):
        for case in cases:
            if case.key in outcome.missing:
                continue  # or failed in the round before
            if case.key.startswith("bf16"):
                outcome.raw.append(disk.raw_speed(weights))
            done = running.measure(case.arm, case.job, _files(setting), logs)
            outcome.add(case.key, done)
            told = done.failure or f"{done.per_token:.3f} s a token"
            print(f"round {number + 1} of {rounds}, {case.name}: {told}", file=sys.stderr, flush=True)
    return outcome


def _prepare(cases: Sequence[Case], logs: Path) -> dict[str, str | None]:
    """Let each arm convert what it wants, once; returns for each why it cannot run, or None."""
    found: dict[str, str | None] = {}
    for case in cases:
        if case.arm not in found:
            if not running.is_installed(case.arm):
                found[case.arm] = "not installed"
            elif case.arm in running.CONVERTING:
                print(f"preparing {case.arm}", file=sys.stderr, flush=True)
                found[case.arm] = running.prepare(case.arm, case.job, logs)
            else:
                found[case.arm] = None
    return found


def _files(setting: Setting) -> list[Path]:
    """Every file that holds weights, the arms' own copies among them."""
    made = [file for file in setting.scratch.rglob("*") if file.is_file()]
    return [file for kind in ("hf", "f16", "q4") for file in setting.models.files(kind)] + made


def setup_of(outcome: Outcome, rounds: int) -> dict[str, Any]:
    """How it was measured."""
    arms = {key: run.measured.told for key, runs in outcome.runs.items() for run in runs[:1] if run.measured}
    failed = dict(outcome.missing)
    peaks = {key: round(outcome.peak(key) / GIB, 3) for key in outcome.runs}
    told = outcome.told
    return {
        "pagein": __version__,
        "weights": f"Qwen2 of {told.models.blocks} blocks, random, {told.weights / 1e9:.2f} GB in bfloat16, "
        f"{len(told.models.files('hf'))} files",
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "rounds": rounds,
        "tokens": told.tokens,
        "raw_read": disk.how_read(),
        "raw_gb_per_second": [round(speed / 1e9, 2) for speed in outcome.raw],
        "arms": arms,
        "failed": failed,
        "peak_gib": peaks,
        "fetched_gb_per_token": {key: round(outcome.fetched(key) / 1e9, 2) for key in arms},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-weights: {error}", file=sys.stderr)
        sys.exit(1)
