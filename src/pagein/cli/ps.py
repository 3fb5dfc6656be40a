"""``pagein ps``."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.bars import PoolBar
from pagein.cli.client import call
from pagein.cli.console import output, print_json, show
from pagein.cli.house import house_lines
from pagein.cli.options import Json, StateDir, Url
from pagein.cli.parts_tables import split_lines
from pagein.cli.views import model_table, problem_lines


def ps(url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """List the models: state, bytes, use.

    HELD is what the ledger counts now, NEED what the next load reserves (~ when only estimated), USE the requests that
    use it now + those that wait. Of a split model that is loaded a line says what of it is in memory; 'pagein parts'
    lists all of it.
    """
    status = call(find_daemon(url, state_dir), lambda client: client.status())
    if json:
        print_json(asdict(status))
        return
    console = output()
    if status.models:
        show(model_table(status.models, console.width), console)
    else:
        show(Text("no models are configured; add one to the configuration, or let 'pagein init' find some"), console)
    for line in [*split_lines(status.models), *problem_lines(status.models)]:
        show(line, console)
    for pool in status.pools:
        show(Text(), console)
        show(PoolBar(pool), console)
    show(Text(), console)
    for line in house_lines(status):
        show(line, console)
