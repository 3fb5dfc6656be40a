"""What the load test found: figures of each level, the table, and the picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from common.stats import percentile
from load.served import Watched
from pagein.cli.chart_png import need_matplotlib

GIB = 1024**3
Cell = Callable[["Level"], float | None]


@dataclass(frozen=True, slots=True)
class Level:
    """One level of the roll-out under the traffic."""

    name: str
    given: int
    """Bytes that the worker was given."""
    cold: float
    """Seconds of the first request to a daemon that has not loaded the model; its files were not in the page cache."""
    watched: Watched
    requests: Sequence[Mapping[str, Any]]
    loads: int
    """Times that a part came from the disk while the traffic ran."""
    instances: int
    """That are resident together in a budget for one full load."""
    instances_pss: int

    @property
    def seconds(self) -> list[float]:
        """Of each request that was answered."""
        return [one["seconds"] for one in self.requests if one["failed"] is None]

    @property
    def failed(self) -> int:
        """Requests without an answer."""
        return sum(one["failed"] is not None for one in self.requests)

    def share(self, share: float) -> float | None:
        """Seconds that so many of the requests take at most."""
        return percentile(self.seconds, share) if self.seconds else None

    @property
    def jitter(self) -> float | None:
        """Seconds between the middle and the 95th percentile of requests of one kind, of the kind where they are most.

        Kinds differ in length; within one, what sets requests apart is the wait for other requests and for parts.
        """
        kinds: dict[str, list[float]] = {}
        for one in self.requests:
            if one["failed"] is None:
                kinds.setdefault(one["task"], []).append(one["seconds"])
        return max((percentile(found, 0.95) - percentile(found, 0.5) for found in kinds.values()), default=None)


def rows(fixed: int) -> list[tuple[str, str, Cell]]:
    """What, unit, and how it is had of a level."""
    return [
        ("peak of the worker, as the kernel counts it", "GiB", lambda one: one.watched.peak / GIB),
        ("given to the worker", "GiB", lambda one: one.given / GIB),
        ("first request, model not loaded, files cold", "s", lambda one: one.cold),
        ("p50", "s", lambda one: one.share(0.5)),
        ("p95", "s", lambda one: one.share(0.95)),
        ("jitter: p95 - p50 within one kind, the most", "s", lambda one: one.jitter),
        ("requests answered", "", lambda one: len(one.seconds)),
        ("requests failed", "", lambda one: one.failed),
        ("parts loaded while they ran", "", lambda one: one.loads),
        (f"instances resident at once in a budget of {fixed / GIB:.2f} GiB", "", lambda one: one.instances),
        ("what those took", "GiB", lambda one: one.instances_pss / GIB),
    ]


def show(full: Level, parts: Level, fixed: int) -> None:
    """Print the table."""
    table = Table(title="Mixed traffic: grammar 5, summarise 3, e-mail 2", title_justify="left")
    table.add_column("what")
    for one in (full, parts):
        table.add_column(one.name, justify="right")
    table.add_column("ratio", justify="right")
    for what, unit, cell in rows(fixed):
        before, after = cell(full), cell(parts)
        ratio = f"{after / before:.2f}" if before and after is not None else "–"
        table.add_row(what, *(f"{_short(one)} {unit}".strip() for one in (before, after)), ratio)
    Console(width=None if Console().is_terminal else 120).print(table)


def _short(number: float | None) -> str:
    return "–" if number is None else f"{number:.4g}"


def draw(path: Path, levels: Sequence[Level]) -> None:
    """Write the picture: memory over time, and which share of the requests took how long; needs no display."""
    need_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    memory, latency = figure.subplots(1, 2)
    for one in levels:
        memory.plot(one.watched.seconds, [pss / GIB for pss in one.watched.pss], label=one.name, linewidth=2)
        ordered = sorted(one.seconds)
        shares = [(place + 1) / len(ordered) for place in range(len(ordered))]
        latency.plot(ordered, shares, label=one.name, linewidth=2, drawstyle="steps-post")
    memory.set(xlabel="seconds of traffic", ylabel="GiB of the worker (PSS)", title="Memory")
    memory.set_ylim(bottom=0)
    latency.axhline(0.95, color="gray", linewidth=1, linestyle=":")
    latency.set(xlabel="seconds of a request", ylabel="share of the requests", title="Latency; dotted: p95")
    for axes in (memory, latency):
        axes.grid(visible=True, alpha=0.25)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
