"""The same chart as a PNG, by matplotlib, which is an extra: nothing else here needs it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pagein.cli.chart import Curve
from pagein.errors import BadUsage, EngineMissing


def need_matplotlib() -> None:
    """Raise EngineMissing with the install line where matplotlib is missing; asked before anything is measured."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise EngineMissing("a PNG needs matplotlib, which is not installed", hint="pip install 'pagein[plot]'")


def write_png(path: Path, curves: Mapping[str, Curve], title: str, x_unit: str, y_unit: str) -> None:
    """Write a PNG; needs no display."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, curve in curves.items():
        axes.plot([x for x, _ in curve], [y for _, y in curve], label=name, linewidth=2)
    axes.set(xscale="log", yscale="log", xlabel=x_unit, ylabel=y_unit, title=title)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BadUsage(f"{path} cannot be written: {error.strerror}") from error
