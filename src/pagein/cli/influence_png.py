"""The influence matrix as a PNG, by matplotlib, which is an extra: nothing else here needs it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pagein.cli.chart_png import need_matplotlib
from pagein.errors import BadUsage
from pagein.parts.splitting.usage import Group
from pagein.units import format_bytes


def write_influence(path: Path, groups: Sequence[Group], tasks: Sequence[str], title: str) -> None:
    """Write a row for each group and a column for each task, the darker the more of it is used; needs no display."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (5 + 0.9 * len(tasks), 1.5 + 0.28 * len(groups))
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.imshow([[group.use[task] for task in tasks] for group in groups], cmap="Blues", vmin=0, vmax=1, aspect="auto")
    axes.set_xticks(range(len(tasks)), labels=list(tasks), rotation=30, ha="right")
    axes.set_yticks(
        range(len(groups)), labels=[f"{one.name}  {format_bytes(one.nbytes)}" for one in groups], fontsize=7
    )
    axes.set_title(title, fontsize=9)
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise BadUsage(f"{path} cannot be written: {error.strerror}") from error
