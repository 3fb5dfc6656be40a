"""``pagein serve``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pagein.cli.address import config_path
from pagein.cli.options import Budget
from pagein.cli.overrides import overridden

if TYPE_CHECKING:
    from pagein.config.schema import Settings


def serve(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="CONFIG", help="Configuration; else $PAGEIN_CONFIG, else pagein.yaml here."),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", metavar="ADDRESS", help="Listen on this address.")] = None,
    port: Annotated[
        int | None,
        typer.Option("--port", min=0, max=65535, metavar="N", help="Listen on this port; 0 takes a free one."),
    ] = None,
    budget: Budget = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Apply the configuration file again whenever it changes.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log grants and waits too.")] = False,
) -> None:
    """Start the daemon and serve the configured models.

    Stays in the foreground until Ctrl-C or SIGTERM; then every model's process is stopped. Each decision is logged to
    standard error with its reason. Options win over the environment, the environment wins over the file. SIGHUP,
    `pagein reload` and --watch apply an edited file; a wrong one changes nothing.
    """
    from pagein.config.load import load_settings
    from pagein.daemon.run import serve as run_daemon
    from pagein.daemon.run import set_up_logging

    path = config_path(config)
    environ = overridden(os.environ, host, port, budget or [])

    def reread() -> Settings:
        return load_settings(path, environ)

    settings = reread()
    set_up_logging(verbose)
    raise typer.Exit(run_daemon(settings, reread=reread, path=path.absolute(), watch=watch))
