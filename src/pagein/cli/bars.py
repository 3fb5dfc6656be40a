"""A pool as a bar: who holds how much of the budget."""

from __future__ import annotations

from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from pagein.gateway.ports import PoolView
from pagein.units import format_bytes

SEGMENTS = (
    ("own", "blue", "█"),
    ("resident", "green", "▓"),
    ("reserved", "yellow", "▒"),
    ("releasing", "magenta", "░"),
    ("left", "red", "▚"),
    ("outside", "cyan", "▞"),
    ("free", "bright_black", "·"),
)
"""Field of the pool, its colour and its glyph without colours, in the order of the bar."""
_WIDEST_BAR = 60
_ALWAYS_NAMED = ("resident", "free")


def shares(parts: list[int], cells: int) -> list[int]:
    """Divide the cells of a bar by the sizes: all are used, and what is not 0 gets one while there are enough."""
    total = sum(parts)
    if total <= 0:
        return [0] * len(parts)
    widths = [max(1, part * cells // total) if part > 0 else 0 for part in parts]
    error = [part * cells / total - width for part, width in zip(parts, widths, strict=True)]
    while sum(widths) != cells:
        step = 1 if sum(widths) < cells else -1
        # One cell to the part that rounding wronged most, or from the one it favoured most, which keeps at least one.
        able = [i for i, width in enumerate(widths) if parts[i] > 0 and width + step > 0] or [widths.index(max(widths))]
        chosen = max(able, key=lambda i: error[i] * step)
        widths[chosen] += step
        error[chosen] -= step
    return widths


@dataclass(frozen=True, slots=True)
class PoolBar:
    """One pool drawn with its figures: the bar, the parts of the budget, its source and what was measured."""

    pool: PoolView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the lines, fitted to the width; shades stand in for colours where there are none."""
        pool = self.pool
        coloured = console.color_system is not None and not console.no_color
        taken = pool.budget - pool.free
        percent = f"  {100 * taken / pool.budget:.0f} %" if pool.budget else ""
        figures = f"  {format_bytes(taken)} of {format_bytes(pool.budget)}{percent}"
        label = max(4, len(pool.name))
        cells = min(_WIDEST_BAR, options.max_width - label - 2 - len(figures))
        table = Table.grid(padding=(0, 2, 0, 0))
        table.add_column(min_width=label, no_wrap=True, style="bold")
        table.add_column()
        table.add_row(pool.name, self._bar(max(5, cells), coloured).append(figures))
        table.add_row("", self._parts(coloured, options.max_width - label - 2))
        table.add_row("", Text(self._measured(), "dim"))
        yield table

    def _bar(self, cells: int, coloured: bool) -> Text:
        sizes = [getattr(self.pool, name) for name, *_ in SEGMENTS]
        text = Text()
        for width, (name, colour, glyph) in zip(shares(sizes, cells), SEGMENTS, strict=True):
            text.append(_glyph(name, glyph, coloured) * width, colour)
        return text

    def _parts(self, coloured: bool, width: int) -> Text:
        """Name the parts of the bar, breaking the line between two of them only."""
        text, column = Text(), 0
        for name, colour, glyph in SEGMENTS:
            size = getattr(self.pool, name)
            if size or name in _ALWAYS_NAMED:
                words = f" {name} {format_bytes(size)}"
                gap = "" if not column else "  " if column + len(words) + 3 <= width else "\n"
                column = len(words) + 1 + (0 if gap == "\n" else column + len(gap))
                text.append(gap).append(_glyph(name, glyph, coloured), colour).append(words)
        return text

    def _measured(self) -> str:
        pool = self.pool
        facts = [pool.source]
        if pool.effective is not None and pool.effective < pool.budget:
            facts.append(f"only {format_bytes(pool.effective)} of it can be had now, others hold the rest")
        if pool.measured is not None:
            facts.append(f"measured {format_bytes(pool.measured)}")
        if pool.highest_measured is not None:
            facts.append(f"peak {format_bytes(pool.highest_measured)}")
        if pool.available is not None:
            facts.append(f"machine free {format_bytes(pool.available)}")
        return ", ".join(facts)


def _glyph(name: str, glyph: str, coloured: bool) -> str:
    return "█" if coloured and name != "free" else glyph
