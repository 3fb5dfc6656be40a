"""Turns the ways in which a worker fails into errors for people, with its last lines of output."""

from __future__ import annotations

from pagein.errors import BadModelFile, ConfigError, EngineMissing, LoadFailed, PageinError, WorkerDied, add_output
from pagein.exits import explain_exit, signal_name
from pagein.protocol import Failed

_KINDS: dict[str, type[PageinError]] = {
    kind.code: kind for kind in (LoadFailed, EngineMissing, BadModelFile, ConfigError)
}

_UNTOLD = "ended; it was adopted, and the system tells how a process ended to its parent only"


def load_error(model: str, why: str, lines: list[str], *, returncode: int | None = None) -> PageinError:
    """The error of a worker that never became ready and said nothing itself; ``why`` follows its name."""
    message = f"model {model!r} could not be loaded: {why}"
    return LoadFailed(add_output(message, lines), hint=None, **_details(model, lines, returncode))


def reported_error(model: str, failed: Failed, lines: list[str]) -> PageinError:
    """The error that the worker itself reported while it loaded."""
    kind = _KINDS.get(failed.code, LoadFailed)
    text = failed.message if repr(model) in failed.message else f"model {model!r} could not be loaded: {failed.message}"
    return kind(add_output(text, lines), hint=failed.hint, **_details(model, lines, None))


def death_error(model: str, returncode: int | None, last_words: str | None, lines: list[str]) -> PageinError:
    """The error of a worker that ended although nobody asked it to; without a return code where that is unknown."""
    ended = explain_exit(returncode) if returncode is not None else _UNTOLD
    how = last_words or f"its worker {ended}"
    message = f"model {model!r} ended: {how}"
    return WorkerDied(add_output(message, lines), hint=None, **_details(model, lines, returncode))


def _details(model: str, lines: list[str], returncode: int | None) -> dict[str, object]:
    details: dict[str, object] = {"model": model, "log": lines}
    if returncode is not None:
        details |= {"exit_code": returncode if returncode >= 0 else None, "signal": signal_name(returncode)}
    return details
