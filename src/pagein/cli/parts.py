"""``pagein parts``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import typer
from rich.text import Text

from pagein.cli.address import find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import errors, output, print_json, show
from pagein.cli.options import Json, StateDir, Url
from pagein.cli.parts_tables import part_table, parts_line, task_table, trouble_lines
from pagein.errors import BadUsage
from pagein.gateway.parts_ports import LEVELS, PartsView


class Verb(StrEnum):
    """What is done with the parts of a model."""

    LOAD = "load"
    UNLOAD = "unload"
    PIN = "pin"
    UNPIN = "unpin"
    REPLACE = "replace"
    ROLLOUT = "rollout"
    REFRESH = "refresh"


_NAMES = {Verb.REPLACE: ("MODEL", "PART", "BY"), Verb.ROLLOUT: ("MODEL",), Verb.REFRESH: ("MODEL",)}
"""What follows a verb; ``MODEL PART`` where nothing else is said."""
_DOING = {
    Verb.LOAD: "loading",
    Verb.UNLOAD: "unloading",
    Verb.PIN: "pinning",
    Verb.UNPIN: "unpinning",
    Verb.REPLACE: "replacing",
    Verb.ROLLOUT: "changing the roll-out",
    Verb.REFRESH: "reading the plan again",
}

Words = Annotated[
    list[str],
    typer.Argument(
        metavar="[load|unload|pin|unpin|replace|rollout|refresh] MODEL [PART] [BY]",
        help="A split model whose parts are listed; or what is done with it, the part, and who takes its place.",
    ),
]
Level = Annotated[
    str | None, typer.Option("--level", metavar="|".join(LEVELS), help="rollout: how much is done on demand.")
]
Percent = Annotated[
    float | None,
    typer.Option("--percent", metavar="N", min=0, max=100, help="rollout: share of the requests that take part."),
]


def parts(
    words: Words,
    level: Level = None,
    percent: Percent = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List the parts of a split model, or load, unload, pin, replace and roll them out.

    HELD is what a part takes of the memory now, SIZE its file, USE the calls that use it. Listing loads nothing. load
    loads the model first where it is not. unload takes nothing that is in use or pinned. replace lets another part
    stand in a part's place while calls run: each has the one or the other, whole. refresh reads the plan again, for
    parts that joined it.

    rollout changes how much is done on demand: auto (parts come and go), manual (they come, and leave by hand alone),
    backbone (they come and leave by hand alone), off (all of them are in memory). --percent is the share of requests
    that need only their task's parts, the others take all of the model. It holds for later workers too, until the
    configuration says otherwise or the daemon starts anew.
    """
    verb, names = _read(words)
    _refuse_strays(verb, level, percent)
    daemon = find_daemon(url, state_dir)
    if verb is None:
        view = call(daemon, lambda client: client.parts(names[0]))
    else:
        with errors().status(f"{_DOING[verb]} …"):
            view = call(daemon, _work(verb, names, level, percent))
    if json:
        print_json(asdict(view))
    else:
        _report(names[0], view, brief=verb is not None and verb is not Verb.REFRESH)


def _read(words: list[str]) -> tuple[Verb | None, list[str]]:
    """Tell the verb from the names; a model of a verb's name is listed where nothing follows. Raises BadUsage."""
    if len(words) == 1:
        return None, words
    if words[0] not in list(Verb):
        raise BadUsage(f"there is nothing called {words[0]!r} to do with parts", hint=f"there are: {', '.join(Verb)}")
    verb, names = Verb(words[0]), words[1:]
    wanted = _NAMES.get(verb, ("MODEL", "PART"))
    if len(names) != len(wanted):
        raise BadUsage(f"{len(names)} names are given", hint=f"pagein parts {verb} {' '.join(wanted)}")
    return verb, names


def _refuse_strays(verb: Verb | None, level: str | None, percent: float | None) -> None:
    for option, given in (("--level", level), ("--percent", percent)):
        if given is not None and verb is not Verb.ROLLOUT:
            raise BadUsage(f"{option} is for rollout")
    if verb is Verb.ROLLOUT and level is None and percent is None:
        raise BadUsage("rollout needs --level, --percent or both")
    if level is not None and level not in LEVELS:
        raise BadUsage(f"--level must be one of {', '.join(LEVELS)}, not {level!r}")


def _work(
    verb: Verb, names: list[str], level: str | None, percent: float | None
) -> Callable[[Client], Awaitable[PartsView]]:
    model, *rest = names
    match verb:
        case Verb.ROLLOUT:
            wish = {name: value for name, value in (("level", level), ("percent", percent)) if value is not None}
            return lambda client: client.act_on_parts(model, "rollout", **wish)
        case Verb.REFRESH:
            return lambda client: client.act_on_parts(model, "parts", "refresh")
        case Verb.REPLACE:
            return lambda client: client.act_on_parts(model, "parts", rest[0], "replace", by=rest[1])
    return lambda client: client.act_on_parts(model, "parts", rest[0], verb.value)


def _report(name: str, view: PartsView, brief: bool) -> None:
    """Print the parts; ``brief`` leaves out the tasks, which the verb did not change."""
    console = output()
    show(parts_line(name, view), console)
    for line in trouble_lines(view):
        show(line, console)
    show(Text(), console)
    show(part_table(view.parts, console.width), console)
    if not brief:
        show(Text(), console)
        show(task_table(view), console)
