"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def complete_model(incomplete: str) -> list[str]:
    """Return the names of the running daemon's models, for the shell; none when no daemon answers."""
    from pagein.cli.address import find_daemon
    from pagein.cli.client import call
    from pagein.errors import PageinError

    try:
        status = call(find_daemon(None, None), lambda client: client.status())
    except PageinError:
        return []
    return [model.name for model in status.models if model.name.startswith(incomplete)]


ModelName = Annotated[
    str, typer.Argument(metavar="MODEL", help="Name of a configured model.", autocompletion=complete_model)
]
Url = Annotated[
    str | None,
    typer.Option("--url", metavar="URL", envvar="PAGEIN_URL", show_envvar=True, help="Address of the daemon."),
]
StateDir = Annotated[
    Path | None,
    typer.Option("--state-dir", metavar="FOLDER", help="State folder of the daemon, where its address is found."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Budget = Annotated[
    list[str] | None,
    typer.Option("--budget", metavar="[POOL=]SIZE", help="Memory budget: 6GiB, 85% or cuda:0=20GiB; repeatable."),
]
