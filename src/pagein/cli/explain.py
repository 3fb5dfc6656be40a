"""``pagein explain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import output, print_json, show
from pagein.cli.options import Json, ModelName, StateDir, Url
from pagein.cli.parts_tables import parts_line, trouble_lines
from pagein.cli.views import STATE_STYLE, decision_table, pool_bytes
from pagein.errors import ModelNotFound
from pagein.gateway.ports import Decision, ModelView
from pagein.units import format_duration


def explain(
    model: ModelName,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show the last N decisions.")] = 20,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Say what was decided about a model, and why.

    Prints how the model stands, where the figure of its need comes from, and the last decisions with their reasons.
    """
    view, decisions = call(find_daemon(url, state_dir), lambda client: _ask(client, model, limit))
    if json:
        print_json({"model": asdict(view), "decisions": [asdict(decision) for decision in decisions]})
        return
    console = output()
    for line in _standing(view):
        show(line, console)
    show(Text(), console)
    if decisions:
        show(decision_table(decisions), console)
    else:
        show(Text("no decision about it since the daemon started"), console)


async def _ask(client: Client, model: str, limit: int) -> tuple[ModelView, list[Decision]]:
    decisions = await client.decisions(model, limit)
    models = (await client.status()).models
    view = next((view for view in models if view.name == model), None)
    if view is None:
        raise ModelNotFound(model, [known.name for known in models])
    return view, decisions


def _standing(view: ModelView) -> list[Text]:
    state = Text.assemble((view.name, "bold"), " is ", (view.state, STATE_STYLE.get(view.state, "")))
    if view.held:
        state.append(f"; holds {pool_bytes(view.held)}".replace("\n", ", "))
    kept = "pinned" if view.pinned else f"priority {view.priority}"
    uses = f"{view.uses} uses, {view.loads} loads"
    load = f", last load {format_duration(view.load_seconds)}" if view.load_seconds is not None else ""
    state.append(f"; {kept}; {uses}{load}")
    lines = [state]
    if view.need:
        need = pool_bytes(view.need).replace("\n", ", ")
        lines.append(Text(f"needs {need} ({view.need_source}): {view.need_explanation}"))
    if view.parts is not None and view.parts.allowance is not None:
        lines += [parts_line("parts", view.parts), *trouble_lines(view.parts)]
    if view.problem:
        lines.append(Text(f"problem: {view.problem}", "red"))
    return lines
