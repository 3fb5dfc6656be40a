"""What the scheduler decides, each with its reason (rule 10)."""

from __future__ import annotations

from dataclasses import dataclass

from pagein.errors import PageinError


@dataclass(frozen=True, slots=True)
class Grant:
    """The request holds a lease on the resident model from now until it is `Finished`."""

    request_id: int
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Refuse:
    """The request ends with this error."""

    request_id: int
    model: str
    error: PageinError

    @property
    def reason(self) -> str:
        """The error's message."""
        return self.error.message


@dataclass(frozen=True, slots=True)
class Wait:
    """The request goes on waiting; sent when the reason or the place in the queue changes."""

    request_id: int
    model: str
    reason: str
    position: int


@dataclass(frozen=True, slots=True)
class Load:
    """Start the worker of a model with this allowance; its bytes are reserved."""

    model: str
    allowance: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the worker of a model, which nobody uses; then measure that its bytes are back."""

    model: str
    reason: str
    evicted_for: str | None = None
    """The model that needs the room, or None."""


@dataclass(frozen=True, slots=True)
class Kill:
    """End a worker although it may be in use: it broke its allowance; its requests fail with the reason."""

    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """Nothing to carry out: a decision that people should see (pinned, need learned, memory of others)."""

    model: str | None
    reason: str


Action = Grant | Refuse | Wait | Load | Stop | Kill | Note
