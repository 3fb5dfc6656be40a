"""``pagein chat``."""

from __future__ import annotations

import json
import secrets
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.text import Text

from pagein.cli.address import Daemon, find_daemon
from pagein.cli.answers import Streamed
from pagein.cli.client import Client, call
from pagein.cli.console import errors, printable
from pagein.cli.faults import guarded
from pagein.cli.offers import offered_by
from pagein.cli.options import ModelName, StateDir, Url
from pagein.errors import BadUsage, CapabilityMissing, ConversationNotFound
from pagein.history import Thread
from pagein.protocol import PATHS, Capability

_HEADER = "X-Pagein-Session"
_SHOWN = 6
"""Messages of a conversation that are shown when it goes on."""
_LONGEST_SHOWN = 400
_HELP = "/exit or Ctrl-D leaves, /history shows what was said, Ctrl-C stops an answer"

Session = Annotated[
    str | None, typer.Option("--session", "-s", metavar="NAME", help="Begin the conversation of this name, or go on.")
]
Resume = Annotated[
    bool, typer.Option("--resume", "-r", help="Go on with the conversation used last, and show its end.")
]
System = Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message of a new conversation.")]


@dataclass(slots=True)
class Talk:
    """A conversation in this terminal."""

    daemon: Daemon
    model: str
    name: str
    system: str | None
    """Said with the first turn that is kept."""


def chat(
    model: ModelName,
    session: Session = None,
    resume: Resume = False,
    system: System = None,
    url: Url = None,
    state_dir: StateDir = None,
) -> None:
    """Talk with a model; the conversation is kept, and goes on whenever you come back.

    The daemon keeps what was said: through eviction of the model, a restart, and with another model. Each line is a
    turn; with standard input from a pipe, too. /exit or Ctrl-D leaves, /history shows what was said, Ctrl-C stops an
    answer, and the turn is then not kept. A task of a split model is named behind it: assistant:email.
    """
    daemon = find_daemon(url, state_dir)
    thread = call(daemon, lambda client: _begin(client, model, session, resume))
    if thread is not None and system is not None:
        raise BadUsage(
            f"session {thread.name!r} has begun already: --system is for a new one", hint="give another --session"
        )
    name = (thread.name or thread.id) if thread is not None else session or _new_name()
    _greet(name, thread, model)
    talk = Talk(daemon, model, name, system)
    if resume:
        _show_history(talk, _SHOWN)
    _turns(talk)


async def _begin(client: Client, model: str, session: str | None, resume: bool) -> Thread | None:
    """Return the session that goes on, None for a new one.

    Raises ModelNotFound and CapabilityMissing before anybody has typed something, and ConversationNotFound.
    """
    offered = offered_by(model, (await client.status()).models)
    if offered and Capability.CHAT not in offered:
        raise CapabilityMissing(model, Capability.CHAT, offered)
    return await _thread(client, session, resume)


async def _thread(client: Client, session: str | None, resume: bool) -> Thread | None:
    """Return the session that goes on, None for a new one; raises ConversationNotFound."""
    if session is None and not resume:
        return None
    if session is not None:
        found = await client.thread(session)
    else:
        found = next((thread for thread in await client.threads() if thread.name is not None), None)
    if found is None and resume:
        what = f"no session {session!r}" if session is not None else "no session"
        raise ConversationNotFound(f"there is {what} to go on with", hint="see 'pagein state ls'")
    return found


def _new_name() -> str:
    return f"chat-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _greet(name: str, thread: Thread | None, model: str) -> None:
    words = "new" if thread is None else f"{thread.entries} messages"
    if thread is not None and thread.model not in (None, model):
        words += f", last with {thread.model}: {model} reads all of it anew"
    errors().print(Text.assemble("session ", (name, "cyan"), f" ({printable(words)}); {_HELP}"), soft_wrap=True)


def _turns(talk: Talk) -> None:
    """Take turns until the end of the input; a turn that failed ends only what no person sits before."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # editing and history of the lines that `input` reads, where Python has it
            import readline  # noqa: F401
    while (line := _read(interactive)) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                errors().print(_HELP)
            case "/history":
                _show_history(talk, None)
            case text if interactive:
                if guarded(lambda text=text: _turn(talk, text)):  # type: ignore[misc]
                    errors().print("this turn was not kept", style="yellow")
            case text:
                _turn(talk, text)


def _read(interactive: bool) -> str | None:
    try:
        return input("> ") if interactive else sys.stdin.readline() or None
    except EOFError:
        print()
        return None


def _turn(talk: Talk, text: str) -> None:
    """Say one thing and print the answer as it comes."""
    messages = [{"role": "system", "content": talk.system}] if talk.system is not None else []
    body: dict[str, object] = {
        "model": talk.model,
        "messages": [*messages, {"role": "user", "content": text}],
        "stream": True,
    }
    call(talk.daemon, lambda client: _print_answer(client, talk, body))
    talk.system = None


async def _print_answer(client: Client, talk: Talk, body: dict[str, object]) -> None:
    printed = Streamed(sys.stdout)
    waiting = errors().status(f"waiting for {talk.model} …")
    waiting.start()
    try:
        async for event in client.stream(PATHS[Capability.CHAT], body, {_HEADER: talk.name}):
            waiting.stop()
            printed.add(event)
    finally:
        waiting.stop()
        printed.close()


def _show_history(talk: Talk, last: int | None) -> None:
    """Print what was said before, long messages shortened where only the end is shown."""
    try:
        said = call(talk.daemon, lambda client: _said(client, talk.name))
    except ConversationNotFound:
        return
    console = errors()
    for role, text in said[-last:] if last is not None else said:
        short = text if last is None or len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"
        console.print(Text.assemble((f"{printable(role)}: ", "bold"), printable(short)), soft_wrap=True)


async def _said(client: Client, name: str) -> list[tuple[str, str]]:
    body = b"".join([chunk async for chunk in client.export(name)])
    entries = (json.loads(line) for line in body.splitlines())
    return [_words(entry["body"]) for entry in entries if entry.get("type") == "entry"]


def _words(message: dict[str, Any]) -> tuple[str, str]:
    content = message.get("content")
    if isinstance(content, list):
        content = " ".join(str(part.get("text", f"[{part.get('type')}]")) for part in content if isinstance(part, dict))
    calls = [f"[calls {call['function']['name']}]" for call in message.get("tool_calls") or []]
    return str(message.get("role", "")), " ".join([*([str(content)] if content else []), *calls])
