"""``pagein lease``."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Annotated
from urllib.parse import urlsplit

import typer
from rich.text import Text

from pagein.cli.address import Daemon, find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import errors, print_json, printable, show
from pagein.cli.faults import NOT_EXECUTABLE, NOT_FOUND
from pagein.cli.house import room_line
from pagein.cli.options import Json, StateDir, Url
from pagein.config.values import is_loopback
from pagein.errors import BadUsage, PageinError
from pagein.gateway.ports import RoomView
from pagein.units import format_bytes, parse_bytes, parse_duration

_LOOK_EVERY = 1.0
"""Seconds between two looks at what the lease waits for."""

Size = Annotated[str | None, typer.Argument(metavar="SIZE", help="Memory that the command needs: 8GiB, 500MB.")]
Command = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND...", help="The command with its arguments, after --.")
]
Pool = Annotated[str, typer.Option("--pool", metavar="POOL", help="Memory that is meant: ram or cuda:N.")]
Wait = Annotated[
    str | None, typer.Option("--wait", metavar="TIME", help="Longest wait, such as 60s; else scheduler.max_wait.")
]
Ttl = Annotated[
    str | None, typer.Option("--ttl", metavar="TIME", help="Ends the lease after this time, if the command does not.")
]


def lease(
    size: Size = None,
    command: Command = None,
    pool: Pool = "ram",
    wait: Wait = None,
    ttl: Ttl = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """Run a program that needs memory of its own, or list such leases.

    Pagein pages out what it must, never what is in use, and starts no model in that memory until the command ends.
    The command takes the place of this process, so it has its pid, its terminal and its exit code. Without SIZE and
    COMMAND the leases are listed.
    """
    daemon = find_daemon(url, state_dir)
    if size is None:
        _list(daemon, json)
        return
    if not command:
        raise BadUsage(f"a lease of {size} needs a command", hint=f"pagein lease {size} -- COMMAND")
    wish = _wish(size, pool, wait, ttl, command)
    _same_machine(daemon)
    if shutil.which(command[0]) is None:  # no model has to leave for a slip of the pen
        raise typer.Exit(_cannot(command[0], os.path.lexists(command[0]) and os.sep in command[0]))
    room = call(daemon, lambda client: _take(client, wish))
    errors().print(f"{room.id}: {_amount(room)} until {printable(command[0])} ends", soft_wrap=True)
    raise typer.Exit(_become(command, daemon, room))


def _list(daemon: Daemon, json: bool) -> None:
    rooms = call(daemon, lambda client: client.rooms())
    if json:
        print_json([asdict(room) for room in rooms])
        return
    for room in rooms:
        show(room_line(room))
    if not rooms:
        show(Text("nobody beside Pagein holds a lease of memory"))


def _wish(size: str, pool: str, wait: str | None, ttl: str | None, command: Sequence[str]) -> dict[str, object]:
    wish: dict[str, object] = {"pool": pool, "pid": os.getpid(), "holder": _holder(command)}
    for name, text, read in (
        ("bytes", size, parse_bytes),
        ("wait", wait, parse_duration),
        ("ttl", ttl, parse_duration),
    ):
        try:
            if text is not None:
                wish[name] = read(text)
        except ValueError as error:
            raise BadUsage(f"{'SIZE' if name == 'bytes' else f'--{name}'}: {error}") from None
    return wish


def _holder(command: Sequence[str]) -> str:
    """The command's name alone: arguments may hold secrets."""
    name = os.path.basename(command[0])
    return "".join(c for c in name if c.isprintable())[:100]


def _same_machine(daemon: Daemon) -> None:
    host = urlsplit(daemon.url).hostname or ""
    if daemon.source == "given" and not is_loopback(host):
        raise BadUsage(
            f"the daemon at {daemon.url} is on another machine: it cannot see when the command ends",
            hint="POST /api/leases with a `ttl` instead",
        )


async def _take(client: Client, wish: dict[str, object]) -> RoomView:
    """Wait for the lease, and say meanwhile what it waits for."""
    telling = asyncio.create_task(_tell(client, wish))
    try:
        return await client.take_room(wish)
    finally:
        telling.cancel()
        with suppress(asyncio.CancelledError):
            await telling


async def _tell(client: Client, wish: dict[str, object]) -> None:
    """Print the reason of the wait whenever it changes; a daemon that cannot say it is no reason to fail."""
    told = ""
    while True:
        await asyncio.sleep(_LOOK_EVERY)
        with suppress(PageinError):
            mine = (room for room in await client.rooms() if (room.pid, room.state) == (wish["pid"], "waiting"))
            room = next(mine, None)
            if room is not None and room.reason != told:
                told = room.reason
                size = f"{format_bytes(room.bytes)} of {room.pool}"
                errors().print(Text(f"waiting for {size}: {printable(told)}"), soft_wrap=True)


def _amount(room: RoomView) -> str:
    return f"{format_bytes(room.bytes)} of {room.pool}"


def _become(command: list[str], daemon: Daemon, room: RoomView) -> int:
    """Turn this process into the command; returns an exit code only where that cannot be, with the lease given back."""
    sys.stdout.flush()
    sys.stderr.flush()
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and the command would inherit that
    try:
        os.execvp(command[0], command)  # noqa: S606 - the command is the user's own
    except OSError as error:
        signal.signal(signal.SIGPIPE, before)
        with suppress(PageinError):  # it ends with this process anyway
            call(daemon, lambda client: client.give_room_back(room.id))
        return _cannot(command[0], not isinstance(error, FileNotFoundError), error.strerror)


def _cannot(name: str, exists: bool, why: str | None = None) -> int:
    words = why or ("it cannot be executed" if exists else "there is no such command")
    errors().print(Text.assemble(("error: ", "bold red"), f"{printable(name)}: {words.lower()}"), soft_wrap=True)
    return NOT_EXECUTABLE if exists else NOT_FOUND
