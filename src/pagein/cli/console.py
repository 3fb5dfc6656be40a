"""Where commands write: coloured and fitted on a terminal, plain and unwrapped text in a pipe, JSON when asked for."""

from __future__ import annotations

import json
import os
import sys
from typing import IO

from rich.console import Console, RenderableType

_PIPE_WIDTH = 1000
"""Columns assumed where there is no terminal: nothing is cut or wrapped, so that grep finds whole lines."""


def output() -> Console:
    """Return a console on standard output."""
    return _console(sys.stdout)


def errors() -> Console:
    """Return a console on standard error."""
    return _console(sys.stderr)


def show(content: RenderableType, console: Console | None = None) -> None:
    """Print to standard output; outside a terminal without the padding that tables leave at the end of lines."""
    console = console or output()
    if console.is_terminal:
        console.print(content)
        return
    with console.capture() as capture:
        console.print(content)
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in capture.get().splitlines()))


def print_json(value: object) -> None:
    """Print a value as JSON for programs."""
    sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def printable(text: str) -> str:
    """Drop control characters, which could otherwise drive the terminal: models and logs write what they like."""
    return "".join(c for c in text if c in "\n\t" or (c >= " " and not "\x7f" <= c <= "\x9f"))


def _console(stream: IO[str]) -> Console:
    if hasattr(stream, "reconfigure"):  # an old locale must not turn a bar into a crash
        stream.reconfigure(errors="replace")
    width = None if stream.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(file=stream, width=width, highlight=False)
