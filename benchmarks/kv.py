"""`make bench-kv`: many long conversations in less memory than their KV takes.

Twenty users read a document each and then ask about it, on one real model (SmolLM2-135M in bfloat16, two cores are
enough). Every way to keep their KV is a process of its own that the kernel holds to the same memory limit: Pagein's
tiers (device budget and disk), transformers with all caches kept, with the last ones kept as far as they fit, and
with nothing kept, so that each turn computes its history; the last also for conversations of 7,000 tokens. One more
run of transformers without a limit shows what equal work takes there. Then the single steps: the same turns where
everything fits, bringing a cold conversation back beside a raw read of the disk, appending at two lengths, and what
the lossy forms of the lower tiers do to the next tokens.

Needs root, since only root makes memory groups. Under ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from common import results
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from kv_arms import running
from kv_arms.cases import MIB, Case, Setting, all_cases, long_cases
from kv_arms.outcome import Outcome, rows_of
from pagein import __version__
from pagein.units import format_bytes, parse_bytes

ROOT = Path(__file__).parents[1]
STEPS = ("paired", "append", "promotion", "lossy")
LENGTHS = (512, 8192)
PROMOTED, PROMOTIONS = 8128, 5
FITTING_TURNS = {"users": 6, "turns": 3, "document": 256, "answer": 32}
LONG = {"users": 6, "document": 7000, "memory": 192 * MIB, "limit": 1100 * MIB}
"""What differs where conversations are long."""
TEXTS = Path(__file__).parent / "texts"
QUICK = {"users": 6, "document": 384, "answer": 8}


def main() -> int:
    """Run, print and write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    setting = Setting(told.model, told.folder, told.limit, told.memory, told.users, told.turns, told.document)
    if told.quick:
        setting = replace(setting, **QUICK)
    longer = setting if told.quick else replace(setting, **LONG)
    loads = [(case, setting) for case in all_cases(setting)] + [(case, longer) for case in long_cases(longer)]
    names = [*(case.key for case, _ in loads), *STEPS]
    if told.only and (unknown := set(told.only) - set(names)):
        raise BenchmarkError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not (told.model / "config.json").is_file():
        raise BenchmarkError(f"there is no model in {told.model}: run `scripts/setup bench`")
    shutil.rmtree(told.folder, ignore_errors=True)
    told.folder.mkdir(parents=True)
    try:
        with tempfile.TemporaryDirectory(prefix="pagein-bench-") as logs:
            outcome = run(Outcome(setting, longer), loads, told.only or names, told.rounds, Path(logs))
    finally:
        shutil.rmtree(told.folder, ignore_errors=True)
    rows = rows_of(outcome)
    results.show("KV caches", rows)
    if told.only or told.quick:
        print("\na part of the benchmark, or a short one: nothing is written")
        return 0
    print(f"\nwritten to {results.write('kv', setup_of(outcome, told.rounds), rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "benchmarks" / "kv"
    model = ROOT / "models" / "smollm2-135m-hf"
    parser.add_argument("--model", type=Path, default=model, help="a model folder (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=folder, help="the disk tier, emptied (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all cases (default %(default)s)")
    parser.add_argument("--limit", type=parse_bytes, default=960 * MIB, help="of each process (default 960MiB)")
    parser.add_argument("--memory", type=parse_bytes, default=96 * MIB, help="for KV on the device (default 96MiB)")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--turns", type=int, default=2, help="of each user, the document's included (%(default)s)")
    parser.add_argument("--document", type=int, default=2400, help="tokens of each document (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="short documents of few users, to try something")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some cases, by their names in the output")
    return parser.parse_args()


def run(
    outcome: Outcome, loads: Sequence[tuple[Case, Setting]], wanted: Sequence[str], rounds: int, logs: Path
) -> Outcome:
    """Round by round, case by case."""
    for number in range(rounds):
        for case, setting in loads:
            if case.key in wanted and _can_run(case, setting):
                done = running.run_case(case, setting, logs)
                outcome.runs.setdefault(case.key, []).append(done)
                _tell(number, rounds, case.key, done)
        for step in (one for one in STEPS if one in wanted):
            done = _step(step, outcome.told, logs)
            getattr(outcome, step).append(done)
            _tell(number, rounds, step, done)
    return outcome


def _can_run(case: Case, setting: Setting) -> bool:
    """Whether what the case begins with is there; `--only` may have left it out."""
    if case.recalls and not setting.histories.is_file():
        print(f"{case.key} begins with the histories that the first case writes: left out", file=sys.stderr)
        return False
    return True


def _step(step: str, setting: Setting, logs: Path) -> running.Run:
    model, turns = str(setting.model), FITTING_TURNS
    arguments = {
        "paired": [model, *(str(turns[name]) for name in ("users", "turns", "document", "answer"))],
        "append": [model, *map(str, LENGTHS)],
        "lossy": [model, *map(str, sorted(TEXTS.glob("*.txt")))],
        "promotion": [model, str(setting.scratch / "cold"), str(PROMOTED), str(PROMOTIONS)],
    }
    return running.run_module(f"kv_arms.{step}", arguments[step], step, logs, None)


def _tell(number: int, rounds: int, key: str, done: running.Run) -> None:
    told = done.failure or "done"
    if done.told is not None and "returning" in done.told:
        speed = done.told["returning"]["tokens_per_second"]
        told = f"{0 if speed is None else speed:.2f} tokens/s, {format_bytes(done.told['memory']['peak_bytes'])} peak"
    print(f"round {number + 1} of {rounds}, {key}: {told}", file=sys.stderr, flush=True)


def setup_of(outcome: Outcome, rounds: int) -> dict[str, Any]:
    """How it was measured."""
    setting = {name: value for name, value in asdict(outcome.told).items() if isinstance(value, int)}
    return {
        "pagein": __version__,
        "model": f"{outcome.told.model.name}, bfloat16",
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "rounds": rounds,
        **setting,
        "long": {name: getattr(outcome.longer, name) for name in LONG},
        "kv_mib_of_all": round(_kept(outcome) / MIB),
        "failed": {key: why for key in outcome.runs if (why := outcome.failure(key)) is not None},
        "group_peak_mib": {key: round(max(r.group_peak for r in runs) / MIB) for key, runs in outcome.runs.items()},
        "where_everything_fits": FITTING_TURNS,
        "lossy": next((run.told["kinds"] for run in outcome.lossy if run.told), None),
        "disk_read": next((run.told["how_read"] for run in outcome.promotion if run.told), None),
        "tiers": next((one["told"] for one in outcome.figures("tiered")), None),
    }


def _kept(outcome: Outcome) -> float:
    """Bytes of KV that all users' conversations take together, as stock keeps them before the last turns."""
    return max((one["told"].get("most_kept_bytes", 0) for one in outcome.figures("stock ample")), default=0)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-kv: {error}", file=sys.stderr)
        sys.exit(1)
