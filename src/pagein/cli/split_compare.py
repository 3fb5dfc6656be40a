"""``pagein split compare``: runs sample calls in each precision, in a process that has torch; shows the differences."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pagein.cli.child import events, need_torch
from pagein.cli.console import errors as error_console
from pagein.cli.console import print_json, show
from pagein.parts.splitting.tasks import read_tasks
from pagein.units import format_bytes

MODULE = "pagein.parts.splitting.comparing"


def run_compare(folder: Path, tasks: Path, precisions: Sequence[str], json: bool) -> None:
    """Compare, and print a row for each task and precision; raises the process's error."""
    need_torch("split compare")
    read_tasks(tasks)
    arguments = [str(folder), "--tasks", str(tasks)]
    for one in dict.fromkeys(precisions):
        arguments += ["--precision", one]
    found: list[dict[str, Any]] = []
    with error_console().status("running the sample calls as stored") as status:
        for event in events(MODULE, arguments, "split compare"):
            found.append({key: value for key, value in event.items() if key != "event"})
            status.update(f"{event['task']} in {event['precision']} is done")
    if json:
        print_json({"compared": found})
    elif not found:
        show(Text(f"{folder} has no precision but stored; 'pagein split apply --precision' adds some", "yellow"))
    else:
        show(_table(found))
        show(Text())
        show(Text("differences of logits or vectors from those as stored; RMS: root mean square of those", "dim"))


def _table(found: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("TASK", style="bold", no_wrap=True)
    table.add_column("PRECISION", no_wrap=True)
    for title in ("BYTES", "STORED", "SAMPLES", "LARGEST", "MEAN", "RMS", "SAME CHOICE"):
        table.add_column(title, justify="right", no_wrap=True)
    for one in found:
        # A process that found NaN or infinity, as activations that overflow in fp16 give, tells none.
        numbers = ["not finite" if one[key] is None else f"{one[key]:.4g}" for key in ("most", "mean", "scale")]
        same = "-" if one["agree"] is None else f"{100 * one['agree']:.1f} %"
        sizes = [format_bytes(one["nbytes"]), format_bytes(one["stored_bytes"])]
        table.add_row(one["task"], one["precision"], *sizes, str(one["samples"]), *numbers, same)
    return table
