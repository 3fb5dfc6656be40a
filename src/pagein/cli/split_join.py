"""``pagein split join``: a part that can stand in another's place, written beside a split that may be served."""

from __future__ import annotations

from pathlib import Path

from rich.text import Text

from pagein.catalog.split.plan import STORED
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.cli.child import events, need_torch
from pagein.cli.console import print_json, printable, show
from pagein.errors import BadUsage
from pagein.units import format_bytes

MODULE = "pagein.parts.splitting.join"


def run_join(folder: Path, source: Path, part: str, replaces: str, json: bool) -> None:
    """Write the part and say how it is taken up; raises BadUsage, UnknownPart, PlanRefused, the process's error."""
    if not source.exists():
        raise BadUsage(f"there is no {source}", hint="--from is a PEFT folder, or a safetensors file")
    with PartsRoot(folder) as root:
        old = read_plan(root).part(replaces)
    if set(old.files) != {STORED}:
        need_torch("split join of a part in several precisions")
    arguments = [str(folder), "--from", str(source), f"--part={part}", "--replaces", old.name]
    for event in events(MODULE, arguments, "split join"):
        if json:
            print_json({name: value for name, value in event.items() if name != "event"})
            continue
        files = event["files"].items()
        sizes = ", ".join(f"{precision} {format_bytes(one['bytes'])}" for precision, one in files)
        show(Text(printable(f"{part} can stand in the place of {old.name}: {sizes}"), "green"))
        show(Text(printable(f"next: pagein parts refresh MODEL; pagein parts replace MODEL {old.name} {part}")))
