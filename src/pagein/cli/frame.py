"""One frame of ``pagein top``: pools as bars, models by state and bytes, the last decisions, fitted to the screen."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from pagein.cli.bars import PoolBar
from pagein.cli.house import house_lines
from pagein.cli.views import STATE_STYLE, decision_lines, model_table
from pagein.gateway.ports import Decision, ModelView, StatusView
from pagein.units import format_duration

_STATES = ("resident", "asleep", "loading", "draining", "releasing", "failed", "absent")
_DECISIONS = 12
"""Decisions in a frame that is not fitted to a screen."""
_FEWEST_DECISIONS = 4
_PARTS = (12, 6, 3, 0)
"""Parts of a split model that are listed below it, from the most on."""


def frame(
    status: StatusView, decisions: Sequence[Decision], console: Console, lines: int | None, note: str | None = None
) -> RenderableType:
    """Lay out one frame of at most ``lines`` lines (None: as many as it takes).

    ``note`` is shown instead of the daemon's state, for a lost connection.
    """
    head: list[RenderableType] = [_header(status, note), *house_lines(status, brief=True), Text()]
    for pool in status.pools:
        head += [PoolBar(pool), Text()]
    models = sorted(status.models, key=_rank)
    latest = collapse(decisions)[::-1]
    if lines is None:
        table = model_table(models, console.width, max(_PARTS))
        return Group(*head, table, Text(), *decision_lines(latest[:_DECISIONS]))
    room = lines - _height(Group(*head), console)
    # Models first, those that hold memory at their head, with as many of their parts as leave room for the others; the
    # decisions get what is left, but never nothing.
    most, shown = room - _FEWEST_DECISIONS - 3, len(models)
    for parts in _PARTS:
        table = model_table(models, console.width, parts)
        if _height(table, console) <= most:
            break
    else:
        counts = range(1, shown)
        shown = max(1, bisect_right(counts, most, key=lambda count: _height(_of(models[:count], console), console)))
        table = _of(models[:shown], console)
    tail: list[RenderableType] = [table]
    if shown < len(models):
        tail.append(Text(f"… and {len(models) - shown} more, see pagein ps", "dim"))
    left = room - _height(Group(*tail), console) - 2
    if left > 0:
        tail += [Text(), *decision_lines(latest[:left])]
    return Group(*head, *tail)


def _of(models: Sequence[ModelView], console: Console) -> Table:
    return model_table(models, console.width)


def _height(content: RenderableType, console: Console) -> int:
    return len(console.render_lines(content))


def collapse(decisions: Iterable[Decision]) -> list[Decision]:
    """Merge runs of the same kind about the same model, or part of it, into their last one, with their number."""
    runs: list[tuple[Decision, int]] = []
    for decision in decisions:
        if runs and _subject(runs[-1][0]) == _subject(decision):
            runs[-1] = (decision, runs[-1][1] + 1)
        else:
            runs.append((decision, 1))
    return [replace(d, reason=f"({count} times) {d.reason}") if count > 1 else d for d, count in runs]


def _subject(decision: Decision) -> tuple[object, ...]:
    return decision.kind, decision.model, decision.data.get("part"), decision.data.get("event")


def _rank(model: ModelView) -> tuple[int, int, str]:
    state = _STATES.index(model.state) if model.state in _STATES else len(_STATES)
    return (state, -sum(model.held.values()), model.name)


def _header(status: StatusView, note: str | None) -> Text:
    counts = {state: sum(model.state == state for model in status.models) for state in _STATES}
    line = Text.assemble(("pagein ", "bold"), status.version, "  ")
    if note is not None:
        line.append(note, "bold red")
    else:
        line.append(f"{status.state}, up {format_duration(status.uptime_seconds)}")
        for state, count in counts.items():
            if count:
                line.append("  ").append(f"{count} {state}", STATE_STYLE[state])
    line.append("  ").append(status.address.removeprefix("http://"), "cyan")
    line.no_wrap, line.overflow = True, "ellipsis"
    return line
