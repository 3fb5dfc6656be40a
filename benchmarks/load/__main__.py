"""`make load-parts`: users of a split model that the fleet serves, everything loaded, and then by parts.

A daemon on loopback serves the split, and Locust's users ask it for grammar, summaries and e-mail over the OpenAI
endpoints (`model: "assistant:grammar"`). First at level `off` of the roll-out, with memory for everything; then at
level `auto`, with room for the backbone and the parts of a few tasks. Table and picture compare memory, latency,
the first request, and how many instances are resident together in a budget for one full load.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common.disk import drop_from_cache
from common.process import end_on_sigterm
from common.wire import BenchmarkError
from load.report import Level, draw, show
from load.served import entry, run_locust, serving, sizes_of, warm
from pagein.cli.chart_png import need_matplotlib
from parts_arms.models import BLOCKS, Models, make
from parts_arms.traffic import KINDS

ROOT = Path(__file__).parents[2]
MODEL = "assistant"
MOST_INSTANCES = 8
BUDGET = 1.06
"""Of what a full load is given: the daemon keeps a part of its budget free."""


def main() -> int:
    """Run both levels, print the table and write the picture."""
    end_on_sigterm()
    need_matplotlib()
    told = read_arguments()
    split = told.split
    if split is None:
        models = Models(ROOT / ".cache" / "benchmarks" / "parts", told.blocks)
        make(models, ROOT / "models" / "smollm2-135m-hf")
        split = models.split
    with tempfile.TemporaryDirectory(prefix="pagein-load-") as folder:
        full = measure("everything loaded (level off)", "off", split, told, Path(folder))
        fixed = int(sizes_of(split, 1).every * BUDGET)
        full = with_instances(full, split, "off", sizes_of(split, 1).every, fixed, Path(folder))
        parts = measure(f"parts (level auto, room for {told.room})", "auto", split, told, Path(folder))
        parts = with_instances(parts, split, "auto", sizes_of(split, 1).some, fixed, Path(folder))
    show(full, parts, fixed)
    draw(told.png, (full, parts))
    print(f"\npicture: {told.png}")
    return 0 if not full.failed and not parts.failed else 1


def read_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser("load", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    png = ROOT / ".cache" / "benchmarks" / "load-parts.png"
    parser.add_argument("--minutes", type=float, default=1.5, help="of traffic for each level (default %(default)s)")
    parser.add_argument("--users", type=int, default=3, help="at once (default %(default)s)")
    parser.add_argument("--room", type=int, default=2, help="tasks whose parts fit at once (default %(default)s)")
    parser.add_argument("--split", type=Path, help="a split with these tasks; by default the one of `make bench-parts`")
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="of that one; fewer make a smaller model")
    parser.add_argument("--png", type=Path, default=png, help="where the picture goes (default: %(default)s)")
    return parser.parse_args()


def measure(name: str, level: str, split: Path, told: argparse.Namespace, folder: Path) -> Level:
    """Serve the split at one level, and let the users ask."""
    sizes = sizes_of(split, told.room)
    given = sizes.every if level == "off" else sizes.some
    say(f"{name}: {told.users} users for {told.minutes:g} minutes")
    drop_from_cache(sorted(split.glob("*.safetensors")))
    with serving({MODEL: entry(split, given, level)}, folder, f"level-{level}") as served:
        tasks = list(KINDS)
        cold = served.chat(MODEL, tasks[0])
        warm(served, MODEL, tasks[1:])
        before = served.part_loads(MODEL)
        with served.watching() as watched:
            requests = run_locust(served, told.users, told.minutes, folder / f"requests-{level}.jsonl", MODEL)
        return Level(name, given, cold, watched, requests, served.part_loads(MODEL) - before, 0, 0)


def with_instances(level: Level, split: Path, name: str, each: int, fixed: int, folder: Path) -> Level:
    """Let a daemon that may take ``fixed`` bytes serve more and more instances, until one of them has to leave."""
    say(f"{level.name}: instances")
    names = [f"{MODEL}-{number}" for number in range(MOST_INSTANCES)]
    most, taken = 0, 0
    with serving({one: entry(split, each, name) for one in names}, folder, f"instances-{name}", fixed) as served:
        for one in names:
            try:
                served.chat(one, next(iter(KINDS)))
            except BenchmarkError as error:
                if not most:
                    say(f"not one instance: {error}")
                break
            resident = served.resident()
            if resident <= most:
                break
            most, taken = resident, served.memory()
    return replace(level, instances=most, instances_pss=taken)


def say(what: str) -> None:
    """Tell how far it is."""
    print(what, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"load-parts: {error}", file=sys.stderr)
        sys.exit(1)
