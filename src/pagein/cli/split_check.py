"""``pagein split check FOLDER``: every file of a split against its plan."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from pagein.cli.console import print_json, printable, show
from pagein.errors import PartRefused
from pagein.parts.files.check import FileCheck, SplitCheck, Vouch, check_split
from pagein.units import format_bytes


def run_check(folder: Path, json: bool, trust: Path | None = None) -> None:
    """Print what was found; raises PlanRefused, and PartRefused where any file would be refused."""
    found = check_split(folder, vouch=_vouch(trust))
    if json:
        print_json(_as_json(found))
    else:
        show(_table(found))
        show(Text())
        show(_summary(folder, found))
        if found.leftovers:
            show(Text(printable(f"left over, read by nothing: {', '.join(found.leftovers)}"), "yellow"))
    if found.faults:
        first = found.faults[0]
        count = f"{len(found.faults)} of {len(found.files)} files would be refused; the first"
        raise PartRefused(
            first.entry.file,
            f"{first.fault} ({count})",
            hint="make the split again into the same folder: sound files are kept",
        )


def _vouch(trust: Path | None) -> Vouch | None:
    if trust is None:
        return None
    from pagein.parts.files.signing import Trust

    return Trust(trust).vouch


def _table(found: SplitCheck) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("PART", style="bold", no_wrap=True)
    for title in ("ROLE", "PRECISION", "SIZE", "TENSORS"):
        table.add_column(title, justify="right" if title in ("SIZE", "TENSORS") else "left", no_wrap=True)
    table.add_column("TASKS", overflow="fold")
    table.add_column("FOUND", overflow="fold")
    for one in found.files:
        tasks = "all" if len(one.part.tasks) == len(found.plan.tasks) else ", ".join(one.part.tasks) or "-"
        cells = [one.part.name, one.part.role.value, one.precision, format_bytes(one.entry.nbytes)]
        table.add_row(*cells, str(len(one.entry.tensors)), tasks, _state(one))
    return table


def _state(one: FileCheck) -> Text:
    return Text("sound", "green") if one.fault is None else Text(one.fault, "bold red")


def _summary(folder: Path, found: SplitCheck) -> Text:
    size = format_bytes(sum(one.entry.nbytes for one in found.files))
    tasks, parts, files = len(found.plan.tasks), len(found.plan.parts), len(found.files)
    bad = len(found.faults)
    verdict = (f"{bad} files would be refused", "bold red") if bad else ("every byte as planned", "green")
    counts = f"{folder}: {_count(tasks, 'task')}, {_count(parts, 'part')}, {_count(files, 'file')} of {size}: "
    return Text.assemble(counts, verdict, f"\nplan {found.plan.digest}")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _as_json(found: SplitCheck) -> dict[str, object]:
    return {
        "plan": found.plan.digest,
        "tasks": sorted(found.plan.tasks),
        "files": [
            {
                "part": one.part.name,
                "role": one.part.role.value,
                "precision": one.precision,
                "file": one.entry.file,
                "bytes": one.entry.nbytes,
                "sha256": one.entry.sha256,
                "fault": one.fault,
            }
            for one in found.files
        ],
        "leftovers": list(found.leftovers),
    }
