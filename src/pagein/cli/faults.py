"""Errors on the command line: one readable line, a hint, and the exit code; never a traceback unless asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

from pagein.errors import PageinError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells count it: 128 + SIGINT."""
NOT_EXECUTABLE = 126
"""Exit code of `pagein lease` for a command that cannot be executed, as shells have it."""
NOT_FOUND = 127
"""Exit code of `pagein lease` for a command that does not exist, as shells have it."""
USAGE = 2
"""Exit code for a command line that cannot be understood, as shells and `BadUsage` have it."""
DEBUG_VARIABLE = "PAGEIN_DEBUG"


def guarded(work: Callable[[], object]) -> int:
    """Run ``work`` and return the exit code; what it raises is printed to standard error first."""
    try:
        result = work()
    except (KeyboardInterrupt, typer.Abort):
        print(file=sys.stderr)
        return INTERRUPTED
    except PageinError as error:
        return _report(error, error.message, error.hint, error.exit_code)
    except OSError as error:  # the system said no; that is no fault of the program
        return _report(error, _system_words(error), None, PageinError.exit_code)
    except Exception as error:
        if hasattr(error, "format_message"):  # what typer raises when the arguments are wrong
            return _report(error, _sentence(error.format_message()), _usage_hint(error), USAGE)
        where = f"set {DEBUG_VARIABLE}=1 for the traceback, and please report it"
        return _report(error, f"{type(error).__name__}: {error}", where, PageinError.exit_code)
    return result if isinstance(result, int) else 0


def _report(error: BaseException, message: str, hint: str | None, exit_code: int) -> int:
    if os.environ.get(DEBUG_VARIABLE, "") not in ("", "0"):
        raise error
    from rich.text import Text

    from pagein.cli.console import errors, printable

    console = errors()
    for label, style, text in (("error", "bold red", message), ("hint", "bold cyan", hint)):
        if text:
            console.print(Text.assemble((f"{label}: ", style), printable(text)), soft_wrap=not console.is_terminal)
    return exit_code


def _system_words(error: OSError) -> str:
    words = error.strerror or str(error)
    return f"{error.filename}: {words}" if error.filename else words


def _sentence(message: str) -> str:
    """Lower the first letter, so that it reads on after ``error:``."""
    return message[:1].lower() + message[1:].rstrip(".")


def _usage_hint(error: object) -> str | None:
    context = getattr(error, "ctx", None)
    return f"see '{context.command_path} --help'" if context is not None else None
