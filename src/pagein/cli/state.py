"""``pagein state``."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.table import Table
from rich.text import Text

from pagein.cli.address import Daemon, find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import print_json, printable, show
from pagein.cli.options import Json, StateDir, Url
from pagein.cli.views import short_duration
from pagein.errors import BadUsage
from pagein.history import Thread
from pagein.units import format_bytes


class Verb(StrEnum):
    """What is done with what is kept."""

    LS = "ls"
    RM = "rm"
    EXPORT = "export"


Action = Annotated[Verb, typer.Argument(metavar="ls|rm|export", help="List, delete, or export as lines of JSON.")]
Names = Annotated[
    list[str] | None, typer.Argument(metavar="[NAME...]", help="Sessions by name, other conversations by id.")
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="New file for an export; else standard output.")
]


def state(
    verb: Action,
    names: Names = None,
    output: Output = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List, delete or export the conversations that are kept.

    They are those of `pagein chat` and of the API: sessions, conversations, and responses that continue each other.
    What is deleted is gone. An export without a name has all of them.
    """
    daemon, given = find_daemon(url, state_dir), names or []
    if output is not None and verb is not Verb.EXPORT:
        raise BadUsage("--output is for an export")
    match verb:
        case Verb.LS:
            _list(daemon, given, json)
        case Verb.RM:
            if not given:
                raise BadUsage("rm needs the names of what shall be deleted", hint="see 'pagein state ls'")
            call(daemon, lambda client: _remove(client, given))
        case Verb.EXPORT:
            _export(daemon, given, output)


def _list(daemon: Daemon, names: list[str], json: bool) -> None:
    threads = [t for t in call(daemon, lambda client: client.threads()) if not names or {t.id, t.name} & {*names}]
    if json:
        print_json([asdict(thread) for thread in threads])
    elif threads:
        show(_table(threads))
    else:
        show(Text("no conversation is kept"))


def _table(threads: Iterable[Thread]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("NAME", overflow="fold")
    for title in ("KIND", "MODEL"):
        table.add_column(title, no_wrap=True)
    for title in ("ITEMS", "SIZE", "USED"):
        table.add_column(title, justify="right", no_wrap=True)
    now = time.time()
    for one in threads:
        used = f"{short_duration(max(now - one.used, 0))} ago"
        name = Text(printable(one.name or one.id), "cyan")
        table.add_row(name, str(one.kind), one.model or "-", str(one.entries), format_bytes(one.bytes), used)
    return table


async def _remove(client: Client, names: list[str]) -> None:
    for name in names:
        await client.forget(name)


def _export(daemon: Daemon, names: list[str], output: Path | None) -> None:
    if output is None:
        call(daemon, lambda client: _write(client, names, sys.stdout.buffer))
        return
    if output.exists():
        raise BadUsage(f"{output} exists already", hint="give another --output")
    draft = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            call(daemon, lambda client: _write(client, names, file))
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, output)  # unlike a rename it never takes the place of another file
    finally:
        with suppress(FileNotFoundError):
            draft.unlink()


async def _write(client: Client, names: list[str], target: BinaryIO) -> None:
    wanted: list[str | None] = [*names] or [None]
    for name in wanted:
        async for chunk in client.export(name):
            target.write(chunk)
    target.flush()
