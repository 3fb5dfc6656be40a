"""``pagein plan``."""

from __future__ import annotations

from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import call
from pagein.cli.console import output, print_json, show
from pagein.cli.options import Json, ModelName, StateDir, Url
from pagein.cli.views import pool_bytes
from pagein.gateway.ports import PlanView

_OUTCOMES = {
    "resident": ("is loaded already", "green"),
    "loading": ("is being loaded", "yellow"),
    "load": ("would be loaded: it fits now", "green"),
    "evict": ("would be loaded after evictions", "yellow"),
    "wait": ("would wait for models that are in use", "cyan"),
    "refuse": ("would be refused", "red"),
}


def plan(model: ModelName, url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Say what loading a model now would do, without doing it.

    Names every model that would leave for it, and why that one. Nothing is loaded or evicted.
    """
    view = call(find_daemon(url, state_dir), lambda client: client.plan(model))
    if json:
        print_json(asdict(view))
        return
    console = output()
    words, style = _OUTCOMES.get(view.outcome, (view.outcome, ""))
    show(Text.assemble((view.model, "bold"), " ", (words, style)), console)
    show(Text(view.reason), console)
    need, free = (pool_bytes(sizes).replace("\n", ", ") for sizes in (view.need, view.free))
    show(Text(f"needs {need}; free now: {free}", "dim"), console)
    if view.evict:
        show(Text(), console)
        show(_leavers(view), console)


def _leavers(view: PlanView) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bright_black")
    table.add_column("WOULD LEAVE", style="bold", overflow="fold", max_width=20)
    table.add_column("FREES", justify="right", no_wrap=True)
    table.add_column("WHY", overflow="fold", ratio=1)
    for leaver in view.evict:
        table.add_row(Text(leaver.model), pool_bytes(leaver.bytes), Text(leaver.reason))
    return table
