"""Renders docs/reference/benchmarks.md from the result files; every benchmark does so when it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.page_storms import details_of, scenario_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
NAMES = (
    "gateway",
    "swap",
    "state",
    "kv",
    "weights",
    "parts",
    "quality",
    "gpu",
    "compute-lock",
    "scenarios",
    "chaos",
    "kill",
    "endurance",
)

INTRODUCTION = """# Benchmarks

*Rendered from `benchmarks/results/` by every `make bench-…`; [`benchmarks/README.md`](../../benchmarks/README.md) says
how it is measured.*

Side-by-side runs against peers, on one machine, in one run, with the same engine and the same settings in every arm
unless a row says otherwise. Rows in which the peer is better are kept. *ratio* is Pagein : peer; it is left out where
either number is not above zero, since a difference of two close times may come out on either side of it.
"""
ABOUT = {
    "gateway": "What Pagein's door adds to talking to the engine directly, beside llama-server's own router (the peer) "
    "and nginx as a plain reverse proxy (the floor).",
    "swap": "Two models and room for one, asked in turn: seconds from the request to the whole answer of four tokens, "
    "beside llama-server's router with `--models-max 1`.",
    "state": "The next turn of a conversation with so many tokens behind it: seconds to the first token, by where its "
    "KV cache is. *recomputed* is what any manager without saved conversations pays; the goals hold at 4,096 tokens. "
    "Snapshots are dropped from the page cache before they are restored.",
    "kv": "Twenty users who read a document each and then ask about it, in less memory than their KV caches take. A "
    "memory group of the kernel holds every way to the same limit; the run of transformers without a limit shows what "
    "equal work takes there. Seconds of users count the wait for the others' turns. Where everything fits both answer "
    "the same turns alternately in one process.",
    "weights": "A model that is larger than the memory it is given: seconds for each token after the first. A memory "
    "group of the kernel holds every arm to the same limit, page cache included, and no file is in the page cache when "
    "a run begins. The floor is what the plan leaves on the disk, at the speed of a raw read of the same files.",
    "parts": "One model with eight tasks, of which each request needs one, under a mixed traffic of grammar, summaries "
    "and e-mail: Pagein with room for one task at a time, and with room for all, beside plain transformers with every "
    "task in memory, and with every task mapped from its files (what the tasks share is in memory once in all), "
    "and beside accelerate's hooks. Where a limit is told, a memory group of the kernel holds every way to it. No file "
    "is in the page cache when a process starts.",
    "quality": "What fewer bits cost a model on a text that nobody tuned for: perplexity beside fp32's (*peer*), and "
    "how far the logits of all positions lie from those of fp32. Blocks packed, head in 8 bits, groups of 64 in 4.",
    "gpu": "A model that is larger than the bytes of a CUDA device that it is given, and conversations whose KV is. "
    "Small models of several kinds "
    "must say, bit for bit, what a full load says there; of the large one a token costs what the longest of reading, "
    "copying and computing takes: the others hide behind it. torch's allocator holds every arm to the same bytes.",
    "compute-lock": "Two heavy models and a light one asked at once, with and without `scheduler.compute_lock` (here "
    "*peer* is Pagein without it).",
    "scenarios": "Situations that break model managers, each stated once and run against every manager that an adapter "
    "drives. *n/a*: the manager has no such notion, or cannot be set up for it. Times are scaled down as told; engines "
    "differ between managers, so verdicts compare behaviour, not speed.",
    "chaos": "Random requests, disconnects, kills, lies about memory, edited configurations, foreign programs and "
    "leases against a real daemon with fake engines; what must hold is judged from outside throughout.",
    "kill": "kill -9 of the daemon at random moments under load, and a new daemon on the same state at once.",
    "endurance": "Many requests over five fake models under a budget that holds two.",
}


def render() -> Path:
    """Write the page; returns its path."""
    parts = [INTRODUCTION]
    for name in NAMES:
        file = RESULTS / f"{name}.json"
        if file.is_file():
            parts.append("\n".join(_section(json.loads(file.read_text()))))
    PAGE.write_text("\n".join(parts))
    return PAGE


def _section(result: dict[str, Any]) -> Iterator[str]:
    host, setup = result["host"], result["setup"]
    yield f"## `make bench-{result['name']}`\n"
    yield f"{ABOUT[result['name']]}\n"
    yield (
        f"- {result['date']}, {host['cpu']}, {host['cores']} cores, {host['memory']}, {host['os']}, "
        f"Python {host['python']}; load average at the start {host['load_average_at_start']}"
    )
    versions = (
        ("Pagein", "pagein"),
        ("llama-server", "llama_server"),
        ("nginx", "nginx"),
        ("torch", "torch"),
        ("transformers", "transformers"),
    )
    if told := [f"{what} {setup[key]}" for what, key in versions if setup.get(key)]:
        yield f"- {'; '.join(told)}"
    if "device" in setup:
        yield f"- on {setup['device']}; host memory: {setup['host_memory']}"
    if "weights" in setup:
        yield f"- weights: {setup['weights']}"
    yield from _details(setup)
    yield from details_of(setup)
    if "scenarios" in setup:
        yield from scenario_table(setup)
        return
    yield "\n| what | unit | Pagein | peer | | ratio | goal |"
    yield "|---|---|---:|---:|---|---:|---|"
    yield from map(_line, result["rows"])
    yield ""


def _details(setup: dict[str, Any]) -> Iterator[str]:
    for kind, facts in setup.get("kinds", {}).items():
        quarter, half, three = facts["direct_ms"]["whole"]
        count = facts["requests_per_arm"]
        yield f"- {kind}: {count} requests per arm; direct {half:g} ms (quartiles {quarter:g} to {three:g})"
    if "raw_read" in setup:
        speeds = setup["raw_gb_per_second"]
        yield f"- raw read: {setup['raw_read']}; {min(speeds):g} to {max(speeds):g} GB/s"
        yield f"- {setup['rounds']} rounds, {setup['tokens']} tokens a run"
        yield f"- arms: {'; '.join(dict.fromkeys(setup['arms'].values()))}"
    if "traffic" in setup:
        kinds = [
            f"{name} {one['of_ten']} ({one['prompt']} → {one['answer']} tokens)"
            for name, one in setup["traffic"].items()
        ]
        yield f"- of ten requests: {', '.join(kinds)}"
        yield f"- one after the other, {setup['requests']} requests of each way, {setup['requests_by_hooks']} by hooks"
        limit, parts = setup["limit_mib"], setup["memory_for_parts_mib"]
        yield f"- the limit: {limit} MiB, {parts} MiB of it for parts: the backbone and one task's"
        if setup["raw_parts_read"]:
            yield f"- raw read: {setup['raw_parts_read']}"
    if "kv_mib_of_all" in setup:
        each = f"{setup['document']} tokens first, then {setup['question']} asked and {setup['answer']} answered"
        yield f"- {setup['model']}: {setup['users']} users, {each}; {setup['kv_mib_of_all']} MiB of KV in all"
        device, limit = (setup[key] // 1024**2 for key in ("memory", "limit"))
        yield f"- each process within {limit} MiB, Pagein's KV in {device} MiB of it; {setup['rounds']} rounds"
        if setup["disk_read"]:
            yield f"- raw read: {setup['disk_read']}"
    if "swaps_per_arm" in setup:
        budgets = ", ".join(f"{name} {budget}" for name, budget in setup["budget"].items())
        yield f"- {setup['swaps_per_arm']} swaps per arm; budgets: {budgets}; its own engine is {setup['own_engine']}"


def _line(row: dict[str, Any]) -> str:
    met = {True: " ✓", False: " ✗", None: ""}[row["met"]]
    cells = (
        row["what"],
        row["unit"],
        "" if row["ours"] is None else f"{row['ours']:g}",
        "" if row["peer"] is None else f"{row['peer']:g}",
        row["peer_name"] or "",
        "" if row["ratio"] is None else f"{row['ratio']:.3g}",
        (row["goal"] or "") + met,
    )
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


if __name__ == "__main__":
    print(render())
