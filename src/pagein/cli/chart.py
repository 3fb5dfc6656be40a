"""A chart of curves in a terminal: logarithmic on both axes, dots of two by four to a character (Braille)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rich.text import Text

Curve = Sequence[tuple[float, float]]

COLOURS = ("cyan", "green", "magenta", "yellow")
_MARKS = "●■▲◆"
"""One for each curve where there are no colours: they are told apart in the legend and at their ends."""
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Bits of a Braille character by row and column (Unicode, U+2800)."""
_WIDE, _HIGH = 2, 4


def chart(curves: Mapping[str, Curve], width: int, height: int, x_unit: str, y_unit: str) -> Text:
    """Draw curves of points above 0 into so many characters, the axes' numbers included."""
    points = [point for curve in curves.values() for point in curve if point[0] > 0 and point[1] > 0]
    if not points:
        return Text("nothing to draw")
    xs, ys = _Axis([x for x, _ in points]), _Axis([y for _, y in points])
    labels = {row: _number(ys.value(1 - row / max(height - 1, 1))) for row in (0, height // 2, height - 1)}
    margin = max(map(len, labels.values())) + 1
    columns = max(width - margin - 2, 10)
    cells = _drawn(curves, xs, ys, columns, height)
    text = Text(f"{y_unit}\n", "dim")
    for row in range(height):
        text.append(f"{labels.get(row, ''):>{margin}} │", "dim")
        for column in range(columns):
            bits, colour = cells.get((row, column), (0, ""))
            text.append(chr(0x2800 + bits) if bits else " ", colour)
        text.append("\n")
    text.append(f"{'':>{margin}} └{'─' * columns}\n", "dim")
    text.append(_below(xs, margin + 2, columns, x_unit), "dim")
    for number, name in enumerate(curves):
        text.append(f"  {_MARKS[number % len(_MARKS)]} {name}", COLOURS[number % len(COLOURS)])
    return text


class _Axis:
    """One logarithmic axis over what there is to show."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low, high = math.log(min(values)), math.log(max(values))
        self._span = (high - self._low) or 1.0

    def share(self, value: float) -> float:
        """Where a value lies, 0 to 1."""
        return (math.log(value) - self._low) / self._span

    def value(self, share: float) -> float:
        """What lies there."""
        return math.exp(self._low + share * self._span)


def _drawn(
    curves: Mapping[str, Curve], xs: _Axis, ys: _Axis, columns: int, rows: int
) -> dict[tuple[int, int], tuple[int, str]]:
    """The dots of each character by (row, column), and the colour of the curve that came last."""
    cells: dict[tuple[int, int], tuple[int, str]] = {}
    for number, curve in enumerate(curves.values()):
        places = [(xs.share(x), ys.share(y)) for x, y in sorted(curve) if x > 0 and y > 0]
        for (x0, y0), (x1, y1) in zip(places, places[1:] or places, strict=False):
            steps = max(2, int(max(abs(x1 - x0) * columns * _WIDE, abs(y1 - y0) * rows * _HIGH)) + 1)
            for step in range(steps):
                part = step / (steps - 1)
                dot_x = round((x0 + (x1 - x0) * part) * (columns * _WIDE - 1))
                dot_y = round((1 - (y0 + (y1 - y0) * part)) * (rows * _HIGH - 1))
                place = (dot_y // _HIGH, dot_x // _WIDE)
                bits = cells.get(place, (0, ""))[0] | _DOTS[dot_y % _HIGH][dot_x % _WIDE]
                cells[place] = (bits, COLOURS[number % len(COLOURS)])
    return cells


def _below(xs: _Axis, margin: int, columns: int, unit: str) -> str:
    """The numbers of the horizontal axis at its ends and in its middle."""
    left, middle, right = (_number(xs.value(share)) for share in (0, 0.5, 1))
    line = left + middle.center(columns - len(left) - len(right)) + right
    return f"{'':>{margin}}{line} {unit}\n"


def _number(value: float) -> str:
    """Three digits: ``64``, ``4.1k``, ``0.031``."""
    if value >= 10_000:
        return f"{value / 1000:.0f}k"
    if value >= 1000:
        return f"{value / 1000:.1f}k"
    return f"{value:.3g}"
