"""Tables that several commands print, narrow enough for 80 columns and with more columns where there is room."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from pagein.gateway.parts_ports import PartView
from pagein.gateway.ports import Decision, ModelView
from pagein.units import format_bytes, format_duration

STATE_STYLE = {
    "resident": "green",
    "asleep": "blue",
    "loading": "yellow",
    "draining": "magenta",
    "releasing": "magenta",
    "failed": "red",
    "absent": "bright_black",
}
PART_STYLE = {
    "hot": "green",
    "loading": "yellow",
    "draining": "magenta",
    "failed": "red",
    "cold": "bright_black",
    "absent": "bright_black",
}
KIND_STYLE = {
    "grant": "green",
    "ready": "green",
    "load": "yellow",
    "wait": "cyan",
    "stop": "magenta",
    "sleep": "magenta",
    "wake": "yellow",
    "lease": "cyan",
    "lease_end": "cyan",
    "deny": "red",
    "reload": "yellow",
    "part": "blue",
    "state": "blue",
    "freed": "magenta",
    "refuse": "red",
    "kill": "red",
    "failed": "red",
}
_NAME_CELLS = 24
"""Columns for a model's name: longer ones fold, unless the screen is very wide."""
_KIND_CELLS = 6
"""Columns for the kind of a decision; few kinds are longer."""
_WIDE = 110
"""From this width on, tables show their further columns."""
_WIDEST = 160


def model_table(models: Iterable[ModelView], width: int, parts: int = 0) -> Table:
    """List models by state and bytes, and below each split one so many of its parts that are in memory."""
    wide = width >= _WIDE
    table = _table()
    models = list(models)
    longest = max((len(model.name) for model in models), default=0)
    cells = _NAME_CELLS if width < _WIDEST else longest
    table.add_column("MODEL", overflow="fold", max_width=cells, no_wrap=longest <= cells)
    table.add_column("STATE", no_wrap=True)
    table.add_column("HELD", justify="right", no_wrap=True)
    table.add_column("NEED", justify="right", no_wrap=True)
    if wide:
        table.add_column("BASIS", no_wrap=True)
        table.add_column("PEAK", justify="right", no_wrap=True)
    table.add_column("USE", justify="right", no_wrap=True)
    table.add_column("IDLE", justify="right", no_wrap=True)
    table.add_column("KEEP", no_wrap=True)
    if wide:
        table.add_column("ENGINE", no_wrap=True)
        table.add_column("DOES", overflow="fold")
    for model in models:
        table.add_row(*_model_row(model, wide))
        for row in _part_rows(model, wide, parts):
            table.add_row(*row)
    return table


def _model_row(model: ModelView, wide: bool) -> list[str | Text]:
    state = Text(model.state, STATE_STYLE.get(model.state, ""))
    use = f"{model.leases}+{model.waiting}" if model.waiting else str(model.leases or "-")
    need = pool_bytes(model.need)
    idle = "-" if model.idle_seconds is None else short_duration(model.idle_seconds)
    keep = "pinned" if model.pinned else model.priority
    if not wide:
        about = "~" if model.need_source == "estimated" and model.need else ""
        return [Text(model.name, "bold"), state, pool_bytes(model.held), about + need, use, idle, keep]
    peak = pool_bytes(model.peak or {})
    does = ", ".join(model.capabilities)
    tail: list[str | Text] = [use, idle, keep, model.engine, does]
    return [Text(model.name, "bold"), state, pool_bytes(model.held), need, model.need_source, peak, *tail]


def _part_rows(model: ModelView, wide: bool, most: int) -> list[list[str | Text]]:
    """The parts of a split model that are in memory or on their way, the largest first; the rest as a number."""
    if model.parts is None or not most:
        return []
    moving = [part for part in model.parts.parts if part.state not in ("cold", "absent")]
    moving.sort(key=lambda part: (-part.bytes, part.name))
    rows = [_part_row(part, wide) for part in moving[:most]]
    if len(moving) > most:
        more: list[str | Text] = [Text(f"  … and {len(moving) - most} more", "bright_black")]
        rows.append([*more, *[""] * (10 if wide else 6)])
    return rows


def _part_row(part: PartView, wide: bool) -> list[str | Text]:
    name, state = Text(f"  {part.name}"), Text(part.state, PART_STYLE.get(part.state, ""))
    held = format_bytes(part.bytes) if part.bytes else "-"
    idle = "-" if part.idle_seconds is None else short_duration(part.idle_seconds)
    tail: list[str | Text] = [str(part.leases or "-"), idle, "pinned" if part.pinned else part.role]
    size = format_bytes(part.file_bytes)
    if not wide:
        return [name, state, held, size, *tail]
    return [name, state, held, size, part.precision or "-", "-", *tail, "", ", ".join(part.tasks)]


def pool_bytes(sizes: dict[str, int]) -> str:
    """Print bytes per pool: the number alone for RAM, one line per pool where a GPU takes part, ``-`` for none."""
    if set(sizes) <= {"ram"}:
        return format_bytes(sizes["ram"]) if sizes.get("ram") else "-"
    return "\n".join(f"{pool} {format_bytes(size)}" for pool, size in sorted(sizes.items()))


def problem_lines(models: Iterable[ModelView]) -> list[Text]:
    """Say of each model that cannot be served now why, and when it is tried again."""
    lines = []
    for model in models:
        if model.problem is not None:
            retry = model.retry_in_seconds
            again = f" (again in {format_duration(retry)})" if retry is not None else ""
            lines.append(Text.assemble((f"{model.name}: ", "red"), f"{model.problem}{again}"))
    return lines


def decision_table(decisions: Iterable[Decision]) -> Table:
    """List decisions about one model, oldest first, with their whole reasons."""
    table = _table()
    table.add_column("TIME", no_wrap=True, style="bright_black")
    table.add_column("WHAT", no_wrap=True)
    table.add_column("WHY", overflow="fold", ratio=1)
    for decision in decisions:
        kind = Text(decision.kind, KIND_STYLE.get(decision.kind, ""))
        table.add_row(clock(decision.time), kind, Text(decision.reason))
    return table


def decision_lines(decisions: Iterable[Decision]) -> list[Text]:
    """Print each decision on one line, under a heading; the screen's edge cuts a long reason."""
    decisions = list(decisions)
    moments = [clock(decision.time) for decision in decisions]
    cells = max(map(len, moments), default=4)
    words = max(_KIND_CELLS, *(len(decision.kind) for decision in decisions), 0)
    lines = [Text(f"{'TIME':{cells}}  {'WHAT':{words}}  {'MODEL':16}  WHY", "bright_black")]
    for moment, decision in zip(moments, decisions, strict=True):
        model = Text(decision.model or "-")
        model.truncate(16, overflow="ellipsis", pad=True)
        kind = (f"{decision.kind:{words}}", KIND_STYLE.get(decision.kind, ""))
        reason = decision.reason.replace("\n", " ")
        lines.append(Text.assemble((f"{moment:{cells}}", "bright_black"), "  ", kind, "  ", model, "  ", reason))
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    return lines


def clock(seconds: float) -> str:
    """Print the local time of day, with the date when it was not today."""
    moment = time.localtime(seconds)
    today = moment[:3] == time.localtime()[:3]
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M", moment)


def short_duration(seconds: float) -> str:
    """Print seconds in few columns: ``3s``, ``12m``, ``5h``, ``2d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"


def _table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
