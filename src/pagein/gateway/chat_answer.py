"""A chat's answer as a worker sends it, in events or whole: reading it without trusting its shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from pagein.errors import BadAnswer
from pagein.gateway.answers import read_json
from pagein.units import format_bytes

LONGEST = 16 * 1024**2
"""Characters of an answer that is put together in memory; a longer one is a fault of the model."""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool's call; what it does not bring is empty."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event, or a whole answer, adds."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None


def piece_of_event(data: bytes) -> Piece:
    """Read one event's data; what is not there, or has another shape, adds nothing."""
    try:
        value = read_json(data)
    except ValueError:
        return Piece()
    if not isinstance(value, dict):
        return Piece()
    if value.get("error"):
        error = value["error"]
        return Piece(error=error if isinstance(error, dict) else {"message": str(error)})
    return _piece(value, "delta")


def whole_answer(model: str, body: bytes) -> tuple[dict[str, Any], Piece]:
    """Read a whole answer: its message as it stands, and what that says; raises BadAnswer."""
    try:
        value: Any = read_json(body)
        message = value["choices"][0]["message"]
    except (ValueError, KeyError, IndexError, TypeError):
        message = None
    if not isinstance(message, dict):
        raise BadAnswer(f"the worker of {model!r} answered a chat without a message", model=model)
    return message, _piece(value, "message")


def _piece(value: dict[str, Any], where: str) -> Piece:
    choices = value.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    said = choice.get(where)
    said = said if isinstance(said, dict) else {}
    calls = said.get("tool_calls")
    usage, finish = value.get("usage"), choice.get("finish_reason")
    return Piece(
        _text(said.get("content")),
        _text(said.get("reasoning_content") or said.get("reasoning")),
        tuple(_call(item, at) for at, item in enumerate(calls) if isinstance(item, dict))
        if isinstance(calls, list)
        else (),
        finish if isinstance(finish, str) else None,
        usage if isinstance(usage, dict) else None,
    )


def _call(item: dict[str, Any], at: int) -> CallPiece:
    function, index = item.get("function"), item.get("index")
    function = function if isinstance(function, dict) else {}
    place = index if isinstance(index, int) and 0 <= index < 1000 else at
    return CallPiece(place, _text(item.get("id")), _text(function.get("name")), _text(function.get("arguments")))


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


@dataclass(slots=True)
class Told:
    """Puts a streamed answer together into the message that a later turn sends again."""

    model: str
    finish: str | None = None
    failed: bool = False
    _content: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, dict[str, str]] = field(default_factory=dict)
    _length: int = 0

    def add(self, piece: Piece) -> None:
        """Take a piece in; raises BadAnswer where the whole gets too long."""
        self.failed = self.failed or piece.error is not None
        self.finish = piece.finish or self.finish
        self._content.append(piece.content)
        self._reasoning.append(piece.reasoning)
        for call in piece.calls:
            whole = self._calls.setdefault(call.index, {"id": "", "name": "", "arguments": ""})
            whole["id"] = whole["id"] or call.id
            whole["name"] = whole["name"] or call.name
            whole["arguments"] += call.arguments
        self._length += piece_length(piece)
        check_length(self.model, self._length)

    def message(self) -> dict[str, Any]:
        """Return the message of the assistant."""
        message: dict[str, Any] = {"role": "assistant", "content": "".join(self._content)}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = [
                {"id": call["id"], "type": "function", "function": {k: call[k] for k in ("name", "arguments")}}
                for _, call in sorted(self._calls.items())
            ]
        return message


def piece_length(piece: Piece) -> int:
    """Return the characters that a piece adds; each counts as one that says anything."""
    return len(piece.content) + len(piece.reasoning) + sum(len(call.arguments) + 16 for call in piece.calls)


def check_length(model: str, length: int) -> None:
    """Raise BadAnswer above `LONGEST`."""
    if length > LONGEST:
        raise BadAnswer(
            f"the answer of {model!r} has more than {format_bytes(LONGEST)}, which is not kept",
            model=model,
            limit_bytes=LONGEST,
        )
