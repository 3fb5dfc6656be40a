"""``pagein logs``."""

from __future__ import annotations

import sys
from asyncio import sleep
from typing import Annotated

import typer

from pagein.cli.address import find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import print_json, printable
from pagein.cli.options import Json, ModelName, StateDir, Url

_PAUSE = 0.5
_WINDOW = 2000
"""Lines asked for at each look while following: more than an engine writes in one pause."""


def logs(
    model: ModelName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on printing what is added, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=1, metavar="N", help="Print the last N lines.")] = 50,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Print the log of a model.

    It has every load, request and unload with duration and bytes, and what the engine itself wrote.
    """
    daemon = find_daemon(url, state_dir)
    if follow:
        call(daemon, lambda client: _follow(client, model, lines))
        return
    text = call(daemon, lambda client: client.log(model, lines))
    if json:
        print_json({"model": model, "lines": text.splitlines()})
    else:
        _print(text.splitlines())


async def _follow(client: Client, model: str, lines: int) -> None:
    before = whole_lines(await client.log(model, _WINDOW))
    _print(before[-lines:])
    while True:
        await sleep(_PAUSE)
        now = whole_lines(await client.log(model, _WINDOW))
        _print(added(before, now))
        before = now


def whole_lines(text: str) -> list[str]:
    """Return the lines that are complete: the last one may still be being written."""
    return text.split("\n")[:-1]


def added(before: list[str], now: list[str]) -> list[str]:
    """Return the lines of ``now`` that come after ``before``, where both are windows on the end of one growing log."""
    for overlap in range(min(len(before), len(now)), 0, -1):
        if before[-overlap:] == now[:overlap]:
            return now[overlap:]
    return now


def _print(lines: list[str]) -> None:
    for line in lines:
        sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()
