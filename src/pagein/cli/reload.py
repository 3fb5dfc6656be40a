"""``pagein reload``."""

from __future__ import annotations

from dataclasses import asdict

from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import call
from pagein.cli.console import errors, print_json, show
from pagein.cli.options import Json, StateDir, Url
from pagein.gateway.ports import ReloadView


def reload(url: Url = None, state_dir: StateDir = None, json: Json = False) -> None:
    """Let the daemon read its configuration again.

    Prints what changed. Models that did not change keep running, changed ones drain and return; one that streams takes
    an edited `memory` while it lives. A wrong file changes nothing: every fault of it is listed, and the daemon goes on
    with what it has.
    """
    daemon = find_daemon(url, state_dir)
    with errors().status("reading the configuration …"):
        view = call(daemon, lambda client: client.reload())
    if json:
        print_json(asdict(view))
        return
    for line in outcome(view):
        show(line)


def outcome(view: ReloadView) -> list[Text]:
    """Say in lines what changed; nothing of it is left out, and what stayed is only counted."""
    rows = (
        ("added", "green", view.added),
        ("changed", "yellow", view.changed),
        ("removed", "magenta", view.removed),
        ("took effect", "cyan", view.settings),
        ("needs a restart", "red", view.needs_restart),
    )
    lines = [Text.assemble((f"{label}: ", style), ", ".join(names)) for label, style, names in rows if names]
    stayed = len(view.unchanged)
    words = f"{stayed} model{'' if stayed == 1 else 's'} unchanged"
    return [*lines, Text(words if lines else f"nothing changed: {words}")]
