"""What every error of the project is."""

from __future__ import annotations

from typing import ClassVar, Self


class PageinError(Exception):
    """An error meant for people: what happened, why, and (in ``hint``) what to do.

    ``details`` holds the numbers behind the message as JSON-ready values; the HTTP error body repeats them.
    """

    code: ClassVar[str] = "pagein_error"
    http_status: ClassVar[int] = 500
    exit_code: ClassVar[int] = 1
    hint: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, **details: object) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, object] = details
        if hint is not None:
            self.hint = hint

    def retold(self, message: str) -> Self:
        """Return the same error in other words."""
        other = self.__class__.__new__(self.__class__)
        Exception.__init__(other, message)
        other.__dict__.update(self.__dict__, message=message)
        return other

    def with_output(self, lines: list[str]) -> Self:
        """Return the same error with the last lines that its worker printed."""
        if not lines or self.details.get("log"):
            return self
        other = self.retold(add_output(self.message, lines))
        other.details = {**self.details, "log": lines}
        return other


def add_output(message: str, lines: list[str]) -> str:
    """Add the last lines of a worker's output to a message."""
    return message if not lines else message + "\nlast output:\n" + "\n".join(f"  {line}" for line in lines)
