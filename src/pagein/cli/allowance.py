"""``pagein allowance``."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import call
from pagein.cli.console import errors, print_json, printable, show
from pagein.cli.options import Json, ModelName, StateDir, Url
from pagein.cli.views import STATE_STYLE
from pagein.errors import BadUsage
from pagein.gateway.ports import ModelView
from pagein.units import format_bytes, parse_bytes

Size = Annotated[str, typer.Argument(metavar="SIZE", help="Memory that it shall keep within: 2GiB, 1500MiB.")]
Pool = Annotated[
    str | None,
    typer.Option("--pool", metavar="POOL", help="Memory that is meant: any but that of its weights is refused."),
]


def allowance(
    model: ModelName,
    size: Size,
    pool: Pool = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Let a loaded model that streams live with more or less memory.

    It goes on computing meanwhile: blocks of weights leave or come between two passes, and what it says stays the
    same. Of a split model idle parts leave, or more of them may stay. Prints its new plan. What is not free, or less
    than it can do with, is refused with both numbers and changes nothing. Holds until it is unloaded; for good set
    `memory` in the configuration.
    """
    try:
        count = parse_bytes(size)
    except ValueError as error:
        raise BadUsage(f"SIZE: {error}") from None
    if count <= 0:
        raise BadUsage(f"SIZE is {size}: it must be more than nothing", hint="`pagein unload` gives all of it back")
    _change(model, count, pool, url, state_dir, json)


def _change(model: str, count: int, pool: str | None, url: str | None, state_dir: Path | None, json: bool) -> None:
    daemon = find_daemon(url, state_dir)
    with errors().status(f"{model} is told …"):
        view, plan = call(daemon, lambda client: client.set_allowance(model, count, pool))
    if json:
        print_json({"model": asdict(view), "memory": count, "plan": plan})
        return
    for line in _outcome(view, count, plan):
        show(line)


def _outcome(view: ModelView, count: int, plan: list[str]) -> list[Text]:
    pool = view.device if view.device in view.need else "ram"
    words = f" and keeps within {format_bytes(count)} of {pool}"
    said = Text.assemble((view.name, "bold"), " is ", (view.state, STATE_STYLE.get(view.state, "")), words)
    return [said, *(Text(f"  {printable(line)}") for line in plan)]
