"""``pagein plan``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import call
from pagein.cli.console import output, print_json, show
from pagein.cli.options import Json, StateDir, Url, complete_model
from pagein.cli.views import pool_bytes
from pagein.errors import BadUsage, DaemonUnreachable, ModelNotFound
from pagein.gateway.ports import PlanView

_OUTCOMES = {
    "resident": ("is loaded already", "green"),
    "loading": ("is being loaded", "yellow"),
    "load": ("would be loaded: it fits now", "green"),
    "evict": ("would be loaded after evictions", "yellow"),
    "wait": ("would wait for models that are in use", "cyan"),
    "refuse": ("would be refused", "red"),
}


_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="Name of a configured model; with --memory also a folder of safetensors.",
        autocompletion=complete_model,
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option("--memory", metavar="SIZE", help="Ask no daemon: weigh the ways to run it in so much memory."),
]
_Context = Annotated[
    int | None, typer.Option("--context", metavar="TOKENS", min=16, help="With --memory: length of a sequence.")
]
_Batch = Annotated[
    int | None, typer.Option("--batch", metavar="COUNT", min=1, help="With --memory: sequences at once.")
]
_Disk = Annotated[
    str | None,
    typer.Option("--disk", metavar="SPEED", help="With --memory: 1.5GB/s, or `measure` to measure it again."),
]


def plan(
    model: _Model,
    memory: _Memory = None,
    context: _Context = None,
    batch: _Batch = None,
    disk: _Disk = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Say what loading a model now would do, without doing it.

    Names every model that would leave for it, and why that one. Nothing is loaded or evicted.

    With --memory it needs no daemon, and weighs the ways to run a folder of safetensors in so much memory: whole or
    streamed, as stored, in 8 or in 4 bits, or not at all. Each has the memory that it takes, the bytes that a token
    reads, and the seconds predicted from the measured speed of the disk. Ends with 5 when it says to give up.
    """
    if memory is not None:
        from pagein.cli.advise import give_advice

        give_advice(model, memory, context, batch or 1, disk, json)
        return
    if context is not None or batch is not None or disk is not None:
        raise BadUsage("--context, --batch and --disk are for advice", hint="give --memory too, such as --memory 8GiB")
    try:
        view = call(find_daemon(url, state_dir), lambda client: client.plan(model))
    except (DaemonUnreachable, ModelNotFound) as error:
        if not Path(model).expanduser().is_dir():
            raise
        raise BadUsage(
            f"{model} is a folder, no model of a daemon's configuration",
            hint=f"to weigh the ways to run it: pagein plan {model} --memory 8GiB",
        ) from error
    if json:
        print_json(asdict(view))
    else:
        _report(view)


def _report(view: PlanView) -> None:
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
