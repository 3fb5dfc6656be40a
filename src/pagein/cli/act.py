"""What load, unload, pin and unpin share: ask the daemon, wait, and say how the model stands afterwards."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import errors, print_json, show
from pagein.cli.views import STATE_STYLE, pool_bytes
from pagein.gateway.ports import Decision, ModelView
from pagein.units import format_duration

_GERUND = {"load": "loading", "unload": "unloading", "pin": "pinning", "unpin": "unpinning"}
_LOOK_BACK = 200


def act(model: str, verb: str, url: str | None, state_dir: Path | None, json: bool) -> None:
    """Do one thing to one model and print the outcome; raises PageinError."""
    daemon = find_daemon(url, state_dir)
    with errors().status(f"{_GERUND[verb]} {model} …"):
        view, evicted = call(daemon, lambda client: _carry_out(client, model, verb))
    if json:
        print_json({"model": asdict(view), "evicted": evicted})
    else:
        show(_outcome(view, verb, evicted))


async def _carry_out(client: Client, model: str, verb: str) -> tuple[ModelView, list[str]]:
    seen = max((decision.seq for decision in await client.decisions(None, 1)), default=0)
    await client.act(model, verb)
    later = [decision for decision in await client.decisions(None, _LOOK_BACK) if decision.seq > seen]
    status = await client.status()
    view = next(view for view in status.models if view.name == model)
    return view, list(dict.fromkeys(name for d in later if (name := _evicted_for(d, model)) is not None))


def _evicted_for(decision: Decision, model: str) -> str | None:
    return decision.model if decision.data.get("evicted_for") == model else None


def _outcome(view: ModelView, verb: str, evicted: list[str]) -> Text:
    line = Text.assemble((view.name, "bold"), " is ", (view.state, STATE_STYLE.get(view.state, "")))
    if verb in ("pin", "unpin"):
        line.append(" and pinned" if view.pinned else " and not pinned")
    if view.held:
        line.append(f"; holds {pool_bytes(view.held)}".replace("\n", ", "))
    if verb == "load" and view.load_seconds is not None:
        line.append(f"; loaded in {format_duration(view.load_seconds)}")
    if evicted:
        line.append(f"; evicted for it: {', '.join(evicted)}")
    return line
