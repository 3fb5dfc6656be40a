"""Parts of split models as tables and lines."""

from __future__ import annotations

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from pagein.cli.console import printable
from pagein.cli.views import PART_STYLE, short_duration
from pagein.gateway.parts_ports import PartsView, PartView
from pagein.gateway.ports import ModelView
from pagein.units import format_bytes, format_duration

_NAME_CELLS = 24
_WIDE = 110
"""From this width on, tables show their further columns."""
_STALE = 10.0
"""Seconds from which on the age of a report is said."""


def part_table(parts: Iterable[PartView], width: int) -> Table:
    """List parts: SIZE is that of the file, HELD what it takes of the memory."""
    wide = width >= _WIDE
    table = _table()
    table.add_column("PART", overflow="fold", max_width=None if wide else _NAME_CELLS)
    table.add_column("ROLE", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for title in ("HELD", "SIZE", "USE", "IDLE", "LOADS"):
        table.add_column(title, justify="right", no_wrap=True)
    if wide:
        table.add_column("EVICTED", justify="right", no_wrap=True)
        table.add_column("LAST LOAD", justify="right", no_wrap=True)
        table.add_column("PRECISION", no_wrap=True)
    table.add_column("KEEP", no_wrap=True)
    if wide:
        table.add_column("TASKS", overflow="fold")
    for part in parts:
        table.add_row(*_part_row(part, wide))
    return table


def _part_row(part: PartView, wide: bool) -> list[str | Text]:
    name = Text(printable(part.name), "bold")
    if part.stands_for is not None:
        name.append(f" for {printable(part.stands_for)}", "cyan")
    state = Text(part.state, PART_STYLE.get(part.state, ""))
    held = format_bytes(part.bytes) if part.bytes else "-"
    idle = "-" if part.idle_seconds is None else short_duration(part.idle_seconds)
    row: list[str | Text] = [name, part.role, state, held, format_bytes(part.file_bytes), str(part.leases or "-"), idle]
    row.append(str(part.loads or "-"))
    if wide:
        took = "-" if part.load_seconds is None else format_duration(part.load_seconds)
        row += [str(part.evictions or "-"), took, part.precision or "-"]
    row.append("pinned" if part.pinned else "-")
    return [*row, Text(printable(", ".join(part.tasks)))] if wide else row


def task_table(view: PartsView) -> Table:
    """List tasks: what each can be asked for, and which parts a call of it needs."""
    table = _table()
    table.add_column("TASK", overflow="fold", max_width=_NAME_CELLS, style="bold")
    table.add_column("DOES", overflow="fold")
    table.add_column("NEEDS", overflow="fold")
    for name, task in sorted(view.tasks.items()):
        does = ", ".join(task.capabilities) or f"{task.kind}: for programs that load the model as a library"
        table.add_row(Text(printable(name)), does, Text(printable(", ".join(task.parts))))
    return table


def parts_line(name: str, view: PartsView) -> Text:
    """Say in one line what of a split model is in memory, and how it is rolled out."""
    here = sum(part.state in ("hot", "draining") for part in view.parts)
    line = Text.assemble((printable(name), "bold"), f": {here} of {len(view.parts)} parts in memory")
    if view.allowance is not None:
        line.append(f", {format_bytes(view.owned)} of {format_bytes(view.allowance)}")
    if view.waiting:
        line.append(f", {view.waiting} call{'' if view.waiting == 1 else 's'} waiting for room")
    line.append(f"; level {view.level}")
    if view.percent < 100:
        line.append(f" for {view.percent:g} % of the requests, the others take all of it")
    if view.age_seconds is not None and view.age_seconds >= _STALE:
        line.append(f"; told {short_duration(view.age_seconds)} ago", "yellow")
    return line


def trouble_lines(view: PartsView) -> list[Text]:
    """Say which parts could not be loaded, and whether they push each other out."""
    lines = []
    thrash = view.thrash
    if thrash is not None and thrash.thrashing:
        which = printable(", ".join(thrash.parts[:4])) or "parts"
        bound = "" if thrash.bound is None else f", at most {thrash.bound} are let through"
        words = f"thrashing: {thrash.reloads} parts came back in the last minute ({which}){bound}; give it more memory"
        lines.append(Text(words, "red"))
    failed = [part for part in view.parts if part.state == "failed" and part.last_error is not None]
    lines += [Text.assemble((f"{printable(part.name)}: ", "red"), printable(part.last_error or "")) for part in failed]
    return lines


def split_lines(models: Iterable[ModelView]) -> list[Text]:
    """Say of each split model that is loaded what of it is in memory, and of each what is wrong with its parts."""
    lines = []
    for model in models:
        if model.parts is not None and model.parts.allowance is not None:
            lines.append(parts_line(model.name, model.parts))
            lines += [Text.assemble("  ", line) for line in trouble_lines(model.parts)]
    return lines


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
