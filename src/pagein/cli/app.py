"""The table of commands, and the group that imports a command's file only when it is called."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

from pagein.cli import faults
from pagein.errors import BadUsage


@dataclass(frozen=True, slots=True)
class Entry:
    """One row of the table: what the command does in one line, and under which heading it is listed."""

    summary: str
    heading: str


COMMANDS: dict[str, Entry] = {
    "serve": Entry("Start the daemon and serve the configured models.", "Set up and serve"),
    "init": Entry("Write a starter configuration from the model files in a folder.", "Set up and serve"),
    "reload": Entry("Let the daemon read its configuration again.", "Set up and serve"),
    "check": Entry("Validate a configuration and say what fits, what pages and what never fits.", "Set up and serve"),
    "doctor": Entry("Say what this machine has and what that means for Pagein.", "Set up and serve"),
    "quantize": Entry(
        "Make 4- or 8-bit shards of a model, to be streamed in a quarter or half of the bytes.", "Set up and serve"
    ),
    "shard": Entry("Lay a model's weights out as one file per block, in running order, unchanged.", "Set up and serve"),
    "split": Entry("Split a model by its capabilities, and look after what was split.", "Set up and serve"),
    "run": Entry("Send a prompt, a recording or an image to a model and print its answer.", "Use models"),
    "chat": Entry("Talk with a model; the conversation is kept, and goes on whenever you come back.", "Use models"),
    "load": Entry("Load a model without using it.", "Use models"),
    "unload": Entry("Unload a model once nobody uses it.", "Use models"),
    "allowance": Entry("Let a loaded model that streams live with more or less memory.", "Use models"),
    "parts": Entry("List the parts of a split model, or load, unload, pin, replace and roll them out.", "Use models"),
    "pin": Entry("Keep a model in memory whatever happens.", "Use models"),
    "unpin": Entry("Let a pinned model be evicted again.", "Use models"),
    "lease": Entry("Run a program that needs memory of its own, or list such leases.", "Use models"),
    "ps": Entry("List the models: state, bytes, use.", "Look inside"),
    "top": Entry("Watch pools, models and decisions live.", "Look inside"),
    "explain": Entry("Say what was decided about a model, and why.", "Look inside"),
    "plan": Entry("Say what loading a model now would do, without doing it.", "Look inside"),
    "logs": Entry("Print the log of a model.", "Look inside"),
    "state": Entry("List, delete, export or check what is kept of conversations.", "Look inside"),
    "bench": Entry("Measure what this machine gives.", "Look inside"),
    "tune": Entry("Find settings for this machine by measuring it.", "Look inside"),
    "version": Entry("Print the version.", "Look inside"),
}
"""Every command. Its function has its name and lives in ``pagein.cli.<name>``; its docstring starts so."""


class Command(TyperCommand):
    """A command whose help is laid out by `pagein.cli.help`."""

    def get_help(self, ctx: Any) -> str:
        """Return nothing: the help is printed here, as only a console knows width and colours."""
        from pagein.cli.console import show
        from pagein.cli.help import command_help

        show(command_help(self, ctx))
        raise typer.Exit


def build(name: str) -> Any:
    """Import the file of a command and return the command."""
    function = getattr(import_module(f"pagein.cli.{name}"), name)
    single = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings=_CONTEXT)
    single.command(name, cls=Command)(function)
    return typer.main.get_command(single)


class Group(TyperGroup):
    """All commands, by the table: listing them imports none of them."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return one command, or None when the table does not have it."""
        return build(cmd_name) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments name; raises BadUsage with the nearest known one."""
        if args and args[0] not in COMMANDS:
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean 'pagein {near[0]}'?" if near else "see 'pagein --help'"
            raise BadUsage(f"there is no command {args[0]!r}", hint=hint)
        return super().resolve_command(ctx, args)

    def get_help(self, ctx: Any) -> str:
        """Print the overview and end; see `Command.get_help`."""
        from pagein.cli.console import show
        from pagein.cli.help import overview

        show(overview(COMMANDS))
        raise typer.Exit

    def main(self, args: Sequence[str] | None = None, *rest: Any, **options: Any) -> NoReturn:
        """Run, print any error as one readable line, and exit with its code."""
        given = list(sys.argv[1:] if args is None else args)
        options["standalone_mode"] = False
        sys.exit(faults.guarded(lambda: super(Group, self).main(given or ["--help"], *rest, **options)))


def _print_version(wanted: bool) -> None:
    if wanted:
        from pagein import __version__

        print(f"pagein {__version__}")
        raise typer.Exit


_CONTEXT = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=Group, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=_CONTEXT)


@app.callback()
def pagein(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Virtual memory for AI models: one memory budget, more models than fit."""
