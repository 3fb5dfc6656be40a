"""``pagein split apply``: writes a split in a process that has torch, and shows how far it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from pagein.cli.child import events, need_torch
from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.errors import BadUsage
from pagein.parts.splitting.analysis import read_analysis
from pagein.units import format_bytes

MODULE = "pagein.parts.splitting.apply"
PRECISIONS = ("bf16", "fp16", "fp32", "int8", "int4")


def run_apply(analysis: Path, out: Path | None, precisions: Sequence[str], dry_run: bool, json: bool) -> None:
    """Write the split that an analysis found, by default beside it; raises the process's error."""
    need_torch("split apply")
    read_analysis(analysis)
    for one in precisions:
        if one not in PRECISIONS:
            raise BadUsage(f"--precision is one of {', '.join(PRECISIONS)}, not {one[:40]!r}")
    folder = out or (analysis if analysis.is_dir() else analysis.parent)
    arguments = [str(analysis), "--out", str(folder)]
    for one in dict.fromkeys(precisions):
        arguments += ["--precision", one]
    arguments += ["--dry-run"] if dry_run else []
    told: dict[str, dict[str, Any]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=error_console(), transient=True) as bar:
        task = bar.add_task("loading the model", total=None)
        for event in events(MODULE, arguments, "split apply"):
            told[event["event"]] = event
            _advance(bar, task, event)
    if json:
        print_json({name: {k: v for k, v in event.items() if k != "event"} for name, event in told.items()})
        return
    if "forecast" in told:
        show(_forecast(told["forecast"]))
    if "written" in told:
        show(_written(told["written"], folder))


def _advance(bar: Progress, task: TaskID, event: Mapping[str, Any]) -> None:
    if event["event"] == "part":
        words = f"{'kept' if event['kept'] else 'wrote'} {event['file']}"
        bar.update(task, completed=event["done_bytes"], total=event["total_bytes"], description=words)


def _forecast(event: Mapping[str, Any]) -> Text:
    need = f"{format_bytes(event['need_bytes'])} ({event['need_bytes']} bytes)"
    sizes = f"{format_bytes(event['total_bytes'])} in all; to write: {need}, free: {format_bytes(event['free_bytes'])}"
    return Text(f"{event['parts']} parts, {sizes}")


def _written(event: Mapping[str, Any], folder: Path) -> Text:
    counts = f"{len(event['wrote'])} files written, {len(event['kept'])} kept"
    swept = f", {len(event['swept'])} left over from before removed" if event["swept"] else ""
    return Text(f"made {folder}: {counts}{swept}\nplan {event['plan']}", "green")
