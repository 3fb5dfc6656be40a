"""Renders docs/reference/benchmarks.md from the result files; every benchmark does so when it ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "benchmarks.md"
RESULTS = ROOT / "benchmarks" / "results"
NAMES = ("gateway", "swap")

INTRODUCTION = """# Benchmarks

*Rendered from `benchmarks/results/` by every run of `make bench`; [`benchmarks/README.md`](../../benchmarks/README.md)
says how it is measured.*

Side-by-side runs against peers, on one machine, in one run, with the same engine and the same settings in every arm
unless a row says otherwise. Rows in which the peer is better are kept. *ratio* is Pagein : peer; it is left out where
either number is not above zero, since a difference of two close times may come out on either side of it.
"""
ABOUT = {
    "gateway": "What Pagein's door adds to talking to the engine directly, beside llama-server's own router (the peer) "
    "and nginx as a plain reverse proxy (the floor).",
    "swap": "Two models and room for one, asked in turn: seconds from the request to the whole answer of four tokens, "
    "beside llama-server's router with `--models-max 1`.",
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
    yield f"- Pagein {setup['pagein']}; llama-server {setup['llama_server']}" + (
        f"; nginx {setup['nginx']}" if setup.get("nginx") else ""
    )
    yield f"- weights: {setup['weights']}"
    yield from _details(setup)
    yield "\n| what | unit | Pagein | peer | | ratio | goal |"
    yield "|---|---|---:|---:|---|---:|---|"
    yield from map(_line, result["rows"])
    yield ""


def _details(setup: dict[str, Any]) -> Iterator[str]:
    for kind, facts in setup.get("kinds", {}).items():
        quarter, half, three = facts["direct_ms"]["whole"]
        count = facts["requests_per_arm"]
        yield f"- {kind}: {count} requests per arm; direct {half:g} ms (quartiles {quarter:g} to {three:g})"
    if "swaps_per_arm" in setup:
        budgets = ", ".join(f"{name} {budget}" for name, budget in setup["budget"].items())
        yield f"- {setup['swaps_per_arm']} swaps per arm; budgets: {budgets}; its own engine is {setup['own_engine']}"


def _line(row: dict[str, Any]) -> str:
    met = {True: " ✓", False: " ✗", None: ""}[row["met"]]
    cells = (
        row["what"],
        row["unit"],
        f"{row['ours']:g}",
        "" if row["peer"] is None else f"{row['peer']:g}",
        row["peer_name"] or "",
        "" if row["ratio"] is None else f"{row['ratio']:.3g}",
        (row["goal"] or "") + met,
    )
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


if __name__ == "__main__":
    print(render())
