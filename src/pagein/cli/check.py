"""``pagein check``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pagein.catalog.allot import DAEMON_BYTES, allot
from pagein.catalog.model import ModelEntry
from pagein.catalog.observed import PeakStore
from pagein.catalog.plan import PlanRow, Verdict, plan
from pagein.catalog.resolve import resolve
from pagein.cli.address import config_path
from pagein.cli.console import output, print_json, show
from pagein.cli.options import Budget, Json
from pagein.cli.overrides import overridden
from pagein.cli.views import pool_bytes
from pagein.config.load import load_settings
from pagein.config.schema import Settings
from pagein.errors import NeverFits, PageinError
from pagein.memory.budget import PoolBudget, resolve_budgets
from pagein.memory.probes.host import read_machine
from pagein.units import format_bytes

_WORDS = {
    Verdict.STAYS: ("stays", "stay", "green"),
    Verdict.FITS: ("fits", "fit", "green"),
    Verdict.PAGES: ("pages", "page", "yellow"),
    Verdict.NEVER: ("never fits", "never fit", "bold red"),
    Verdict.BROKEN: ("broken", "broken", "bold red"),
}
"""Each verdict for one model, for several, and its colour."""
_WIDE = 110
"""From this width on, reasons stand beside the models instead of below them."""


def check(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Configuration; else $PAGEIN_CONFIG, else pagein.yaml here."),
    ] = None,
    budget: Budget = None,
    json: Json = False,
) -> None:
    """Validate a configuration and say what fits, what pages and what never fits.

    Nothing is loaded. Figures are measured peaks where this machine remembers any, else declared, else estimated from
    the files' headers. Ends with 5 when a model can never fit, with 1 when one cannot be served for another reason.
    """
    path = config_path(file)
    settings = load_settings(path, overridden(os.environ, budget=budget or []))
    budgets, entries, rows = make_plan(settings)
    if json:
        print_json(_as_json(path, settings, budgets, entries, rows))
    else:
        console = output()
        _report(path, budgets, rows, console)
        for line in remarks(settings, entries):
            show(Text(line, "yellow"), console)
    verdicts = {row.verdict for row in rows}
    if Verdict.NEVER in verdicts:
        raise typer.Exit(NeverFits.exit_code)
    if Verdict.BROKEN in verdicts:
        raise typer.Exit(PageinError.exit_code)


def make_plan(settings: Settings) -> tuple[dict[str, PoolBudget], dict[str, ModelEntry], list[PlanRow]]:
    """Return the budgets, the resolved models and the plan for this machine; raises PageinError."""
    machine = read_machine()
    budgets = resolve_budgets(machine, settings.budget)
    peaks = PeakStore.open(settings.state_dir / "peaks.sqlite")
    try:
        entries = {name: resolve(name, model, machine, peaks) for name, model in settings.models.items()}
    finally:
        peaks.close()
    sizes = {name: pool.bytes for name, pool in budgets.items()}
    entries = allot(entries, settings.models, sizes)
    return budgets, entries, plan(entries, settings.models, sizes, DAEMON_BYTES)


def remarks(settings: Settings, entries: dict[str, ModelEntry]) -> list[str]:
    """Say what of the split models will be refused although they can be served."""
    lines = []
    for name, entry in entries.items():
        if entry.split is None or entry.info is None or entry.problem is not None:
            continue
        missing = entry.info.metadata.get("missing")
        for part, why in sorted(missing.items()) if isinstance(missing, dict) else ():
            tasks = ", ".join(entry.split.parts[part].tasks) or "none"
            lines.append(f"{name}: part {part} cannot be loaded ({why}); tasks that need it: {tasks}")
        given = settings.models[name].memory
        if given is not None and entry.least is not None and given < entry.least:
            least = format_bytes(entry.least)
            lines.append(f"{name}: memory is {format_bytes(given)}; for its largest task it takes about {least}")
    return lines


def _report(path: Path, budgets: dict[str, PoolBudget], rows: list[PlanRow], console: Console) -> None:
    show(Text.assemble((str(path), "bold"), " is valid: ", _counts(rows)), console)
    for pool in budgets.values():
        own = f", about {format_bytes(DAEMON_BYTES)} of it for the daemon" if pool.name == "ram" else ""
        show(Text(f"{pool.name}: budget {format_bytes(pool.bytes)} ({pool.source}){own}"), console)
    if rows:
        show(Text(), console)
        show(_plan(rows, console), console)
    if console.width < _WIDE:
        for row in rows:
            show(Text(), console)
            show(Text(row.model, "bold"), console)
            show(Padding(_why(row), (0, 0, 0, 2)), console)


def _counts(rows: list[PlanRow]) -> str:
    if not rows:
        return "no models are configured"
    found = {verdict: sum(row.verdict is verdict for row in rows) for verdict in _WORDS}
    words = [f"{count} {_WORDS[v][0 if count == 1 else 1]}" for v, count in found.items() if count]
    return f"{'1 model' if len(rows) == 1 else f'{len(rows)} models'}; {', '.join(words)}"


def _plan(rows: list[PlanRow], console: Console) -> Table:
    """Lay out the plan: reasons beside the models where there is room, else below each."""
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("MODEL", style="bold", overflow="fold", max_width=32)
    table.add_column("NEED", justify="right", no_wrap=True)
    table.add_column("PLAN", no_wrap=True)
    if wide:
        table.add_column("WHY", overflow="fold", ratio=1)
    for row in rows:
        cells = [
            Text(row.model),
            Text(pool_bytes(dict(row.need))),
            Text(_WORDS[row.verdict][0], _WORDS[row.verdict][2]),
        ]
        table.add_row(*cells, *([_why(row)] if wide else []))
    return table


def _why(row: PlanRow) -> Text:
    return Text.assemble(row.reason, ("\n" + _basis(row), "bright_black")) if row.need else Text(row.reason)


def _basis(row: PlanRow) -> str:
    source = row.source.value
    return row.explanation if row.explanation.startswith(source) else f"{source}: {row.explanation}"


def _as_json(
    path: Path,
    settings: Settings,
    budgets: dict[str, PoolBudget],
    entries: dict[str, ModelEntry],
    rows: list[PlanRow],
) -> dict[str, object]:
    models = []
    for row in rows:
        entry = entries[row.model]
        facts = {"engine": entry.engine, "engine_version": entry.engine_version, "device": entry.device}
        models.append(
            {
                "name": row.model,
                "verdict": row.verdict.value,
                "reason": row.reason,
                "need": dict(row.need),
                "need_source": row.source.value,
                "need_explanation": row.explanation,
                "left": dict(row.left),
                "capabilities": sorted(entry.capabilities),
                "context": entry.context,
                "tasks": sorted(entry.split.tasks) if entry.split is not None else None,
                **facts,
            }
        )
    return {
        "config": str(path),
        "budgets": [asdict(pool) for pool in budgets.values()],
        "models": models,
        "remarks": remarks(settings, entries),
    }
