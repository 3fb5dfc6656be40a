"""``pagein state``."""

from __future__ import annotations

import os
import secrets
import sys
from contextlib import suppress
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, BinaryIO

import typer
from rich.text import Text

from pagein.cli.address import Daemon, find_daemon
from pagein.cli.client import Client, call
from pagein.cli.console import print_json, show
from pagein.cli.options import Json, StateDir, Url
from pagein.cli.state_tables import blocks_line, reuse_line, snapshot_table, thread_table, usage_line
from pagein.cli.state_verify import SNAPSHOT, verify
from pagein.errors import BadUsage, ConversationNotFound
from pagein.gateway.snapshot_ports import Removed, SavedView
from pagein.history import Thread
from pagein.units import format_bytes, parse_duration


class Verb(StrEnum):
    """What is done with what is kept."""

    LS = "ls"
    RM = "rm"
    EXPORT = "export"
    VERIFY = "verify"
    GC = "gc"


Action = Annotated[
    Verb,
    typer.Argument(
        metavar="ls|rm|export|verify|gc",
        help="List; delete; export conversations as lines of JSON; read what is kept through; remove old snapshots.",
    ),
]
Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="[NAME...]", help="Sessions by name; other conversations and snapshots by id."),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="New file for an export; else standard output.")
]
All = Annotated[bool, typer.Option("--all", help="rm: delete every conversation and every snapshot.")]
Idle = Annotated[
    str | None, typer.Option("--idle", metavar="TIME", help="gc: remove what was not used for this long, e.g. 7d.")
]


def state(
    verb: Action,
    names: Names = None,
    output: Output = None,
    everything: All = False,
    idle: Idle = None,
    url: Url = None,
    state_dir: StateDir = None,
    json: Json = False,
) -> None:
    """List, delete, export or check what is kept of conversations.

    There are conversations (what was said: sessions, conversations, responses that continue each other) and snapshots
    (what a model computed of them, so that the next turn need not); KV blocks are the same for the engine transformers,
    which go with their conversation, with gc and with rm --all. What is deleted is gone.

    An export without a name has all conversations. verify without a name reads every snapshot and every KV block, moves
    damaged snapshots aside, drops damaged blocks, and then fails. gc without --idle removes what was not used
    for `state.retain`.
    """
    daemon, given = find_daemon(url, state_dir), names or []
    _refuse_strays(verb, output, everything, idle)
    match verb:
        case Verb.LS:
            _list(daemon, given, json)
        case Verb.RM:
            _remove(daemon, given, everything)
        case Verb.EXPORT:
            _export(daemon, given, output)
        case Verb.VERIFY:
            verify(daemon, given, json)
        case Verb.GC:
            _collect(daemon, given, idle, json)


def _refuse_strays(verb: Verb, output: Path | None, everything: bool, idle: str | None) -> None:
    for option, given, of in (
        ("--output", output is not None, Verb.EXPORT),
        ("--all", everything, Verb.RM),
        ("--idle", idle is not None, Verb.GC),
    ):
        if given and verb is not of:
            raise BadUsage(f"{option} is for {of}")


# ── ls ──────────────────────────────────────────────────────────────────────────────────────────────


def _list(daemon: Daemon, names: list[str], json: bool) -> None:
    async def ask(client: Client) -> tuple[list[Thread], SavedView]:
        return await client.threads(), await client.saved()

    threads, saved = call(daemon, ask)
    threads = [one for one in threads if not names or {one.id, one.name} & {*names}]
    snapshots = [one for one in saved.snapshots if not names or {one.id, one.model} & {*names}]
    if json:
        listed = {"conversations": [asdict(one) for one in threads], **asdict(saved)}
        print_json({**listed, "snapshots": [asdict(one) for one in snapshots]})
        return
    if threads:
        show(thread_table(threads))
    else:
        show(Text("no conversation is kept"))
    show(Text())
    if snapshots:
        show(snapshot_table(snapshots))
    show(usage_line(saved.usage))
    for store in saved.blocks:
        show(blocks_line(store))
    for model in saved.models:
        show(reuse_line(model))


# ── rm ──────────────────────────────────────────────────────────────────────────────────────────────


def _remove(daemon: Daemon, names: list[str], everything: bool) -> None:
    if everything and names:
        raise BadUsage("rm takes names or --all, not both")
    if not (everything or names):
        raise BadUsage("rm needs the names of what shall be deleted, or --all", hint="see 'pagein state ls'")
    if everything:
        show(Text(call(daemon, _remove_all)))
    else:
        call(daemon, lambda client: _remove_named(client, names))


async def _remove_named(client: Client, names: list[str]) -> None:
    for name in names:
        try:
            await client.forget(name)
        except ConversationNotFound:
            if not SNAPSHOT.fullmatch(name):
                raise
            await client.forget_snapshot(name)


async def _remove_all(client: Client) -> str:
    removed, count, before = await client.forget_snapshots(), 0, -1
    while count > before and (threads := await client.threads()):  # a list has its longest length
        before = count
        for thread in threads:
            with suppress(ConversationNotFound):  # another has deleted it meanwhile
                await client.forget(thread.id)
                count += 1
    return f"deleted {_conversations(count)} and {_told(removed)}"


def _conversations(count: int) -> str:
    return f"{count} conversation{'' if count == 1 else 's'}"


def _told(removed: Removed) -> str:
    plural = "" if removed.snapshots == 1 else "s"
    beside = f" and {format_bytes(removed.blocks)} of KV blocks" if removed.blocks else ""
    return f"{removed.snapshots} snapshot{plural} ({format_bytes(removed.bytes)}){beside}"


# ── export ──────────────────────────────────────────────────────────────────────────────────────────


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


# ── gc ──────────────────────────────────────────────────────────────────────────────────────────────


def _collect(daemon: Daemon, names: list[str], idle: str | None, json: bool) -> None:
    if names:
        raise BadUsage("gc takes no names", hint="'pagein state rm' does")
    try:
        seconds = parse_duration(idle) if idle is not None else None
    except ValueError as error:
        raise BadUsage(f"--idle: {error}") from None
    removed = call(daemon, lambda client: client.collect_garbage(seconds))
    if json:
        print_json(asdict(removed))
    else:
        show(Text(f"removed {_told(removed)}"))
