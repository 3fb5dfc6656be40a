"""`make bench-parts`: one model with eight tasks, of which each request needs one.

Eight models of real shape (SmolLM2-360M, bfloat16, random weights) that have their embeddings and lowest blocks in
common and upper blocks of their own, split by Pagein; a mixed traffic of grammar, summaries and e-mail. Beside Pagein:
plain transformers with every task in memory, and with every task mapped from its files, both with what is shared once;
accelerate's hooks, which read a task's own blocks for each use. Each is a process of its own. Where a limit is told,
the kernel holds each to it: a full load that exceeds it is killed, one of mapped files reads them again and again. Then
the single steps: a part from the disk beside a raw read, a warm call beside the plain model, and LoRAs beside PEFT.

Needs root, since only root makes memory groups, and a disk with 12 GB free (`--folder`).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from common import results
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from kv_arms.running import Run
from pagein import __version__
from pagein.units import format_bytes, parse_bytes
from parts_arms import running
from parts_arms.cases import GIB, MIB, Case, Setting, all_cases, cold_cases, instance
from parts_arms.models import BLOCKS, TASKS, Models, make
from parts_arms.outcome import Outcome, rows_of
from parts_arms.traffic import BLOCK, KINDS

ROOT = Path(__file__).parents[1]
REQUESTS, STARTS, INSTANCES = 30, 2, 4
BESIDE = 448 * MIB
STEPS = ("instances", "swap_in", "paired", "lora", "lora pagein", "lora peft")
SWAPS, PASSES, ANSWERS, LORA_CALLS = 5, 60, 15, 32
QUICK_BLOCKS = 8


def main() -> int:
    """Run, print and write."""
    end_on_sigterm()
    told = read_arguments()
    host = results.describe_host()
    models = Models(told.folder, QUICK_BLOCKS if told.quick else told.blocks)
    make(models, told.tokenizer)
    requests = BLOCK if told.quick else told.requests
    setting = Setting(models, told.beside, requests, told.instances)
    if (free := psutil.virtual_memory().available) < (need := models.whole + GIB):
        raise BenchmarkError(f"{format_bytes(free)} of memory are free, a full load takes {format_bytes(need)}")
    names = [*(case.key for case in (*all_cases(setting), *cold_cases(setting))), *STEPS]
    if told.only and (unknown := set(told.only) - set(names)):
        raise BenchmarkError(f"no case {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    with tempfile.TemporaryDirectory(prefix="pagein-bench-") as logs:
        outcome = run(setting, told.only or names, 1 if told.quick else told.starts, Path(logs))
    rows = rows_of(outcome)
    results.show("Parts on demand", rows)
    if told.only or told.quick or told.blocks != BLOCKS:
        print("\na part of the benchmark, or of the model: nothing is written")
        return 0
    print(f"\nwritten to {results.write('parts', setup_of(outcome), rows, host)}")
    return 0


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = ROOT / ".cache" / "benchmarks" / "parts"
    tokenizer = ROOT / "models" / "smollm2-135m-hf"
    parser.add_argument("--folder", type=Path, default=folder, help="where the model goes (default: %(default)s)")
    parser.add_argument("--tokenizer", type=Path, default=tokenizer, help="a model folder that has SmolLM2's")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each case, tens (default %(default)s)")
    parser.add_argument("--starts", type=int, default=STARTS, help="cold starts of each way (default %(default)s)")
    parser.add_argument(
        "--instances", type=int, default=INSTANCES, help="that share a full load's memory (%(default)s)"
    )
    parser.add_argument("--beside", type=parse_bytes, default=BESIDE, help="of the limit, not for parts (448MiB)")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="a smaller model, to try something")
    parser.add_argument("--quick", action="store_true", help="a small model and few requests, to try something")
    parser.add_argument("--only", nargs="+", metavar="CASE", help="some cases, by their names in the output")
    return parser.parse_args()


def run(setting: Setting, wanted: Sequence[str], starts: int, logs: Path) -> Outcome:
    """The traffic case by case, then starts in turn, then the single steps."""
    outcome = Outcome(setting)
    for case in all_cases(setting):
        if case.key in wanted:
            keep(outcome, case, running.run_case(case, setting, logs))
    for number in range(starts):
        for case in cold_cases(setting):
            if case.key in wanted:
                keep(outcome, case, running.run_case(case, setting, logs, number))
    if "instances" in wanted:
        _instances(outcome, setting, logs)
    for name in STEPS[1:]:
        if name in wanted:
            _step(outcome, name, setting, logs)
    return outcome


def keep(outcome: Outcome, case: Case, done: Run) -> None:
    """Note a run, and say how it went."""
    outcome.runs.setdefault(case.key, []).append(done)
    told = done.failure or ""
    if done.told is not None:
        peak = format_bytes(done.told["memory"]["peak_bytes"])
        told = f"first answer after {done.told['cold']['process']:.1f} s, {peak} peak"
        if done.told["seconds"]:
            told += f", {sum(done.told['seconds']) / len(done.told['seconds']):.2f} s a request"
    print(f"{case.key}: {told}", file=sys.stderr, flush=True)


def _instances(outcome: Outcome, setting: Setting, logs: Path) -> None:
    taken = outcome.peak("full ample")
    if taken is None:
        print("instances share what 'full ample' takes, which did not run: left out", file=sys.stderr)
        return
    outcome.instances_limit = int(taken * MIB)
    outcome.instances = running.run_together(instance(setting), setting, outcome.instances_limit, logs)
    alive = sum(run.told is not None for run in outcome.instances)
    failures = {run.failure for run in outcome.instances if run.failure}
    print(f"instances: {alive} of {setting.instances} {'; '.join(failures)}", file=sys.stderr, flush=True)


def _step(outcome: Outcome, name: str, setting: Setting, logs: Path) -> None:
    models = setting.models
    module, _, way = name.partition(" ")
    if module == "lora" and way != "pagein" and importlib.util.find_spec("peft") is None:
        outcome.runs[name] = [Run(None, failure="PEFT is not installed")]
    else:
        places = [str(one) for one in (models.base, models.adapters, models.lora_split)]
        arguments = {
            "swap_in": [str(models.split), str(SWAPS)],
            "paired": [str(models.split), str(PASSES), str(ANSWERS)],
            "lora": [*places, str(LORA_CALLS), *([way] if way else ("pagein", "peft", "hotswap"))],
        }
        outcome.runs[name] = [running.run_step(module, arguments[module], setting, logs, name)]
    print(f"{name}: {outcome.failure(name) or 'done'}", file=sys.stderr, flush=True)


def setup_of(outcome: Outcome) -> dict[str, Any]:
    """How it was measured."""
    setting = outcome.told
    models = setting.models
    backbone = models.sizes["backbone"]
    kinds = {name: {"of_ten": one.share, "prompt": one.prompt, "answer": one.answer} for name, one in KINDS.items()}
    swapped = next(iter(outcome.figures("swap_in")), None)
    return {
        "pagein": __version__,
        "torch": importlib.metadata.version("torch"),
        "transformers": importlib.metadata.version("transformers"),
        "weights": f"{len(TASKS)} tasks of SmolLM2-360M's shape, random, bfloat16: {backbone / 1e9:.2f} GB shared "
        f"(embeddings and {models.shared} of {models.blocks} blocks), {models.whole / 1e9:.2f} GB in all",
        "traffic": kinds,
        "requests": setting.requests,
        "requests_by_hooks": setting.few,
        "limit_mib": round(setting.limit / MIB),
        "memory_for_parts_mib": round(models.one_task / MIB),
        "instances_limit_mib": round(outcome.instances_limit / MIB),
        "raw_parts_read": swapped["how_read"] if swapped else None,
        "ways": {key: one["told"] for key in outcome.runs for one in outcome.figures(key)[:1] if "told" in one},
        "failed": {key: why for key in outcome.runs if (why := outcome.failure(key)) is not None},
    }


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"bench-parts: {error}", file=sys.stderr)
        sys.exit(1)
