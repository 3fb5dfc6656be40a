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
    """End a worker although it may be in use: it broke its allowance or hangs; its requests fail with the reason."""

    model: str
    reason: str
    error: PageinError | None = None
    """What its requests are told, where that is more than the reason."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Tell the worker of a model, which nobody uses, to sleep; then measure what it keeps."""

    model: str
    reason: str
    evicted_for: str | None = None


@dataclass(frozen=True, slots=True)
class Wake:
    """Wake the worker of a model with this allowance; its bytes are reserved."""

    model: str
    allowance: dict[str, int]
    reason: str


@dataclass(frozen=True, slots=True)
class Resize:
    """Tell the worker of a model to keep within this allowance from now on; bytes that it gains are its already."""

    model: str
    allowance: dict[str, int]
    reason: str
    pool: str = "ram"
    """The pool in which it changes."""


@dataclass(frozen=True, slots=True)
class Retain:
    """A model keeps the allowance that it has, although an operator wanted another."""

    model: str
    error: PageinError

    @property
    def reason(self) -> str:
        """The error's message."""
        return self.error.message


@dataclass(frozen=True, slots=True)
class Give:
    """An outsider holds the memory that it asked for."""

    room: str
    reason: str


@dataclass(frozen=True, slots=True)
class Deny:
    """An outsider can never have the memory that it asked for."""

    room: str
    error: PageinError

    @property
    def reason(self) -> str:
        """The error's message."""
        return self.error.message


@dataclass(frozen=True, slots=True)
class Renewed:
    """A model has its new settings, is new, or is gone from the configuration."""

    model: str
    removed: bool
    reason: str
    lives: bool = False
    """Its worker goes on: nothing of it changed but what it is allowed to take."""


@dataclass(frozen=True, slots=True)
class Note:
    """Nothing to carry out: a decision that people should see (pinned, need learned, memory of others)."""

    model: str | None
    reason: str


Action = Grant | Refuse | Wait | Load | Stop | Kill | Sleep | Wake | Resize | Retain | Give | Deny | Renewed | Note
