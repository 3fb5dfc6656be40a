"""The help pages: one layout for the overview, for each command and, from the same rows, for the reference page."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pagein.cli.app import Entry

_WIDTH = 100
"""Help is set no wider than this, however wide the terminal: long lines read badly."""

ADDRESS_NOTE = (
    "Commands that talk to the daemon find it by --url, $PAGEIN_URL, the file daemon.json in its state folder, "
    "or at http://127.0.0.1:7311, in this order."
)


def overview(commands: Mapping[str, Entry]) -> RenderableType:
    """Lay out the page of ``pagein --help``."""
    parts: list[RenderableType] = [
        Text.assemble(("pagein", "bold"), "  virtual memory for AI models: one memory budget, more models than fit"),
        Text(),
        _usage("pagein COMMAND [OPTIONS]"),
    ]
    for heading in dict.fromkeys(entry.heading for entry in commands.values()):
        rows = [(name, entry.summary) for name, entry in commands.items() if entry.heading == heading]
        parts += [Text(), _heading(heading), _rows(rows, max(map(len, commands)))]
    options = [("-h, --help", "Show this page, or a command's page."), ("--version", "Print the version.")]
    completion = ("--install-completion", "Let the shell complete commands and options.")
    parts += [Text(), _heading("Options"), _rows([*options, completion], 0), Text(), Text(ADDRESS_NOTE, "dim")]
    return _page(parts)


def command_help(command: Any, ctx: Any) -> RenderableType:
    """Lay out the help page of one command."""
    summary, details = describe(command)
    parts: list[RenderableType] = [_usage(usage(command)), Text(), Text(summary)]
    parts += [Padding(Text(block), (1, 0, 0, 0)) for block in details]
    for heading, rows in (("Arguments", arguments(command)), ("Options", options(command, ctx))):
        if rows:
            parts += [Text(), _heading(heading), _rows(rows, 0)]
    return _page(parts)


def describe(command: Any) -> tuple[str, list[str]]:
    """Return the first line of a command's docstring and its further paragraphs, each as one line."""
    blocks = inspect.cleandoc(command.help or "").split("\n\n")
    return blocks[0].replace("\n", " "), [block.replace("\n", " ") for block in blocks[1:]]


def usage(command: Any) -> str:
    """Return the usage line of a command, without the word usage."""
    pieces = [_argument_name(p) for p in command.params if p.param_type_name == "argument"]
    last = [piece for piece in pieces if "-- " in piece]  # what follows `--` are no options of this command any more
    return " ".join(["pagein", command.name, *(p for p in pieces if p not in last), "[OPTIONS]", *last])


def arguments(command: Any) -> list[tuple[str, str]]:
    """Return the arguments of a command as (name, what it is)."""
    return [(_argument_name(p), _meaning(p)) for p in command.params if p.param_type_name == "argument"]


def options(command: Any, ctx: Any = None) -> list[tuple[str, str]]:
    """Return the options of a command as (how it is written, what it does)."""
    rows = [(_option_name(p), _meaning(p)) for p in command.params if p.param_type_name == "option"]
    return [*rows, ("-h, --help", "Show this page.")]


def _argument_name(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _option_name(parameter: Any) -> str:
    names = ", ".join(sorted([*parameter.opts, *parameter.secondary_opts], key=len))
    return names if parameter.is_flag else f"{names} {parameter.metavar or parameter.name.upper()}"


def _meaning(parameter: Any) -> str:
    notes = []
    if parameter.default not in (None, False, "", [], ()) and not callable(parameter.default):
        notes.append(f"default {parameter.default}")
    if parameter.envvar and parameter.show_envvar:
        notes.append(f"or ${parameter.envvar}")
    note = f" ({', '.join(notes)})" if notes else ""
    return f"{(parameter.help or '').rstrip('.')}{note}."


def _usage(text: str) -> Text:
    return Text.assemble(("usage: ", "dim"), text)


def _heading(text: str) -> Text:
    return Text(text, "bold")


def _rows(rows: list[tuple[str, str]], width: int) -> Table:
    table = Table.grid(padding=(0, 3, 0, 0))
    table.add_column(style="cyan", no_wrap=True, min_width=width + 2)
    table.add_column()
    for name, meaning in rows:
        table.add_row(f"  {name}", Text(meaning))
    return table


def _page(parts: list[RenderableType]) -> RenderableType:
    from rich.constrain import Constrain

    return Constrain(Group(*parts), _WIDTH)
