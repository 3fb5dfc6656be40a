"""Curves in a terminal, and as a PNG."""

from __future__ import annotations

import importlib.util
from itertools import pairwise

import pytest

from pagein.cli import chart_png
from pagein.cli.chart import chart
from pagein.errors import EngineMissing

RISING = [(64.0, 0.1), (512.0, 0.8), (4096.0, 6.4)]
FLAT = [(64.0, 0.1), (4096.0, 0.1)]


def drawn(curves, width=60, height=10):
    """The lines of a chart: its unit, its rows, its axis and the legend."""
    return chart(curves, width, height, "tokens", "seconds").plain.split("\n")


def dots(line: str) -> list[int]:
    """Columns with dots in them."""
    return [column for column, c in enumerate(line) if 0x2801 <= ord(c) <= 0x28FF]


def test_a_rising_curve_goes_from_the_lower_left_to_the_upper_right():
    """The largest value is at the top, the first at the left edge, and each row lies left of the one above."""
    rows = drawn({"one": RISING})[1:11]
    firsts = [dots(row)[0] for row in rows if dots(row)]
    assert len(firsts) == 10
    assert firsts == sorted(firsts, reverse=True)


def test_a_straight_line_in_both_logarithms_is_straight():
    """Seconds that grow as tokens do are a diagonal, which is why both axes are logarithmic."""
    rows = drawn({"one": RISING}, width=66, height=12)[1:13]
    middles = [sum(dots(row)) / len(dots(row)) for row in rows]
    steps = [before - after for before, after in pairwise(middles)]
    assert max(steps) - min(steps) < 2


def test_two_curves_are_named_and_both_drawn():
    """The legend has every curve in order; a flat one stays at the bottom."""
    lines = drawn({"anew": RISING, "from disk": FLAT})
    assert "● anew" in lines[-1]
    assert "■ from disk" in lines[-1]
    assert len(dots(lines[10])) > 40


def test_the_axes_have_their_numbers():
    """Ends of both axes, in three digits."""
    text = "\n".join(drawn({"one": RISING}))
    for number in ("6.4 ", "0.1 ", "64", "4.1k", "tokens", "seconds"):
        assert number in text


def test_no_line_is_wider_than_asked():
    """A terminal would wrap it."""
    assert max(len(line) for line in drawn({"one": RISING}, width=50)[:-1]) <= 50 + len(" tokens")


@pytest.mark.parametrize("curves", [{}, {"one": []}, {"one": [(0.0, 1.0), (1.0, 0.0)]}])
def test_nothing_to_draw(curves):
    """What has no logarithm is left out; nothing left is said, not drawn."""
    assert drawn(curves) == ["nothing to draw"]


def test_one_point_is_drawn():
    """An axis of no length does not divide by zero."""
    assert sum(len(dots(line)) for line in drawn({"one": [(64.0, 0.5)]})) >= 1


def test_a_png_without_matplotlib_says_how_to_install_it(monkeypatch, tmp_path):
    """The error is the install line, before anything is measured."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EngineMissing, match="matplotlib") as caught:
        chart_png.write_png(tmp_path / "curve.png", {"one": RISING}, "", "", "")
    assert caught.value.hint == "pip install 'pagein[plot]'"


def test_a_png_is_a_png(tmp_path, monkeypatch):
    """Without a display, whatever backend the environment names."""
    pytest.importorskip("matplotlib")
    monkeypatch.delenv("DISPLAY", raising=False)
    chart_png.write_png(tmp_path / "curve.png", {"one": RISING, "two": FLAT}, "title", "tokens", "seconds")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG\r\n")
