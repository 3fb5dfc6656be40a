"""An error that came as JSON, from a daemon or a worker, as the class that its code names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from pagein.errors.base import PageinError

_OWN = ("message", "hint", "code", "type", "self")


def error_told(told: Mapping[str, object]) -> PageinError:
    """Return the error of the ``error`` object of an answer: class, message, hint and numbers."""
    kind = next((kind for kind in _kinds(PageinError) if kind.code == told.get("code")), PageinError)
    error = kind.__new__(kind)  # the message is complete already: the class's own constructor would build it anew
    numbers = {name: value for name, value in told.items() if name not in _OWN and value is not None}
    hint, message = told.get("hint"), told.get("message") or kind.code
    PageinError.__init__(error, str(message), hint=hint if isinstance(hint, str) else None, **numbers)
    return error


def _kinds(root: type[PageinError]) -> Iterator[type[PageinError]]:
    for kind in root.__subclasses__():
        yield kind
        yield from _kinds(kind)
