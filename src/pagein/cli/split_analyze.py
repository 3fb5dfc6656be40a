"""``pagein split analyze MODEL``: runs the analysis in a process that has torch, and shows what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pagein.cli.child import events, need_torch
from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.parts.splitting.analysis import Analysis, read_analysis
from pagein.parts.splitting.tasks import read_tasks
from pagein.units import format_bytes

MODULE = "pagein.parts.splitting.analyse"


def run_analyze(folder: Path, tasks: Path, out: Path, png: Path | None, json: bool) -> None:
    """Analyse, print matrix, parts and verdict, and write the PNG where one is wanted; raises the process's error."""
    need_torch("split analyze")
    read_tasks(tasks)  # what is wrong with the file is said before anything is loaded
    if png is not None:
        from pagein.cli.chart_png import need_matplotlib

        need_matplotlib()
    arguments = [str(folder), "--tasks", str(tasks), "--out", str(out)]
    with error_console().status("starting") as status:
        for event in events(MODULE, arguments, "split analyze"):
            status.update(_words(event))
    analysis = read_analysis(out)
    if png is not None:
        from pagein.cli.influence_png import write_influence

        write_influence(png, analysis.groups, list(analysis.tasks), f"{folder.name}: which task uses which weights")
    if json:
        print_json(_document(analysis))
    else:
        _show(analysis, out, png)


def _words(event: Mapping[str, Any]) -> str:
    match event["event"]:
        case "loading":
            return f"loading {event['folder']} ({event['number']} of {event['of']})"
        case "traced":
            return f"{event['task']}: sample {event['sample']} of {event['of']} used {event['tensors']} tensors"
        case "proven":
            return f"{event['task']}: proven with everything else out of memory"
    return "writing the analysis"


def _show(analysis: Analysis, out: Path, png: Path | None) -> None:
    show(matrix(analysis))
    show(Text())
    show(_parts(analysis))
    show(Text())
    show(_tasks(analysis))
    for line in analysis.verdict():
        show(Text(line, "yellow" if "nothing" in line else ""))
    for one in _reasons(analysis):
        show(Text(one, "dim"))
    wrote = f"wrote {out} and {png}" if png is not None else f"wrote {out}"
    show(Text(f"{wrote}; next: pagein split apply {out}", "green"))


def matrix(analysis: Analysis) -> Table:
    """Return the influence matrix: a row for each group of tensors, a column for each task."""
    table = _table(("GROUP", "SIZE", *(task.upper() for task in analysis.tasks)), right=1)
    for group in analysis.groups:
        table.add_row(group.name, format_bytes(group.nbytes), *_shares([group.use[task] for task in analysis.tasks]))
    return table


def _shares(shares: Sequence[float]) -> list[Text]:
    marks = [
        ("·", "dim") if one == 0 else ("●", "green") if one == 1 else (f"{100 * one:.0f} %", "yellow") for one in shares
    ]
    return [Text(*mark, justify="center") for mark in marks]


def _parts(analysis: Analysis) -> Table:
    table = _table(("PART", "ROLE", "SIZE", "TENSORS", "TASKS"), right=2)
    for name, part in analysis.assignment.parts.items():
        tasks = "all" if len(part.tasks) == len(analysis.tasks) else ", ".join(part.tasks)
        table.add_row(name, part.role.value, format_bytes(part.nbytes), str(len(part.tensors)), tasks)
    for name, nbytes in analysis.adapter_bytes.items():
        users = [task for task, one in analysis.tasks.items() if one.adapter == name]
        table.add_row(name, "adapter", format_bytes(nbytes), "", ", ".join(users))
    return table


def _tasks(analysis: Analysis) -> Table:
    table = _table(("TASK", "KIND", "SAMPLES", "USED", "SOMETIMES", "PROOF", "PARTS"), right=2)
    for name, one in analysis.tasks.items():
        used = f"{one.touched} tensors, {format_bytes(one.touched_bytes)}"
        proof = Text(f"{one.compared} results bit-identical", "green")
        parts = ", ".join(analysis.parts_of(name))
        table.add_row(name, one.kind, str(one.samples), used, str(one.sometimes), proof, parts)
    return table


def _table(titles: Sequence[str], right: int) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    for at, title in enumerate(titles):
        table.add_column(
            title, justify="right" if at == right else "left", overflow="fold", style="bold" if not at else ""
        )
    return table


def _reasons(analysis: Analysis) -> list[str]:
    """Say of what stays in the backbone although not all tasks use it, why: one line for each reason."""
    sizes: dict[str, tuple[int, int]] = {}
    for one in analysis.assignment.kept:
        count, nbytes = sizes.get(one.reason, (0, 0))
        sizes[one.reason] = (count + 1, nbytes + one.nbytes)
    return [
        f"in the backbone: {count} tensors ({format_bytes(nbytes)}), since {reason}"
        for reason, (count, nbytes) in sizes.items()
    ]


def _document(analysis: Analysis) -> dict[str, object]:
    assignment = analysis.assignment
    return {
        "tasks": {
            name: {**asdict(one), "parts": list(analysis.parts_of(name)), "saves": asdict(analysis.saves[name])}
            for name, one in analysis.tasks.items()
        },
        "parts": {
            name: {
                "role": part.role.value,
                "tasks": list(part.tasks),
                "bytes": part.nbytes,
                "tensors": list(part.tensors),
            }
            for name, part in assignment.parts.items()
        },
        "adapters": dict(analysis.adapter_bytes),
        "groups": [asdict(group) for group in analysis.groups],
        "kept": [asdict(one) for one in assignment.kept],
        "untouched": list(assignment.untouched),
        "tied": [list(group) for group in assignment.tied],
        "sharing": asdict(analysis.sharing),
        "verdict": analysis.verdict(),
        "made": dict(analysis.made),
    }
