"""Translates a chat's answer into a response: its events in OpenAI's order, and the response as a whole."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pagein.errors import PageinError
from pagein.gateway.chat_answer import CallPiece, Piece, check_length, piece_length
from pagein.gateway.response_items import Event, OpenCall, OpenItem, OpenMessage, OpenReasoning

K = TypeVar("K", bound=OpenItem)
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons of a chat's end that leave its response incomplete."""
_ITEM = 512
"""Characters that an item counts as, beside what it says."""
_ERRORS = {429: "rate_limit_exceeded"}


class ResponseBuilder:
    """One response from its first event to its last; give it the pieces in order, then `finish` or `fail`."""

    def __init__(self, identity: str, model: str, told: Mapping[str, Any]) -> None:
        self.id = identity
        self._model = model
        self._told = told
        self._created = self._ended = int(time.time())
        self._items = 0
        self._open: OpenItem | None = None
        """The message or reasoning that goes on."""
        self._calls: dict[int, OpenCall] = {}
        self._done: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None
        self._length = 0
        self._number = 0
        self._begun = False

    def add(self, piece: Piece) -> Iterator[Event]:
        """Take a piece in and yield its events; raises BadAnswer where the answer gets too long."""
        yield from self.begin()
        self._length += piece_length(piece)
        check_length(self._model, self._length)
        self._finish = piece.finish or self._finish
        self._usage = piece.usage or self._usage
        if piece.reasoning:
            yield from self._say(OpenReasoning, piece.reasoning)
        if piece.content:
            yield from self._say(OpenMessage, piece.content)
        for call in piece.calls:
            yield from self._call(call)

    def begin(self) -> Iterator[Event]:
        """Yield the first two events, once."""
        if self._begun:
            return
        self._begun = True
        for kind in ("created", "in_progress"):
            yield self._numbered({"type": f"response.{kind}", "response": self._response("in_progress")})

    def finish(self) -> Iterator[Event]:
        """Yield what closes the items; `last` follows once the turn is kept."""
        yield from self.begin()
        if not self._items:
            yield from self._say(OpenMessage, "")
        status = self.status
        yield from self._close(status)
        for call in self._calls.values():
            yield from self._closed(call, status)
        self._calls.clear()
        self._ended = int(time.time())

    def last(self) -> Event:
        """Return the last event, with the whole response."""
        return self._numbered({"type": f"response.{self.status}", "response": self.response()})

    def fail(self, status: int, error: Mapping[str, Any]) -> Event:
        """Return the last event of a response that broke; before its first one, a bare error."""
        message, code = str(error.get("message", "the model failed")), error.get("code")
        if not self._begun:
            return self._numbered({"type": "error", "code": code, "message": message, "param": error.get("param")})
        kind = _ERRORS.get(status, "invalid_prompt" if status < 500 else "server_error")
        told = {"code": kind, "message": message, "type": code if isinstance(code, str) else None}
        response = {**self._response("failed"), "error": told}
        return self._numbered({"type": "response.failed", "response": response})

    @property
    def status(self) -> str:
        """How it ended: completed or incomplete."""
        return "incomplete" if self._finish in _INCOMPLETE else "completed"

    @property
    def output(self) -> list[dict[str, Any]]:
        """The items that are complete, in their order."""
        return [self._done[index] for index in sorted(self._done)]

    def response(self) -> dict[str, Any]:
        """Return the whole response after `finish`."""
        reason = _INCOMPLETE.get(self._finish or "")
        return {
            **self._response(self.status),
            "completed_at": self._ended if reason is None else None,
            "incomplete_details": {"reason": reason} if reason is not None else None,
            "usage": _usage(self._usage),
        }

    def _response(self, status: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": self._model,
            "output": self.output,
            "truncation": "disabled",
            "usage": None,
            **self._told,
        }

    def _say(self, kind: type[K], piece: str) -> Iterator[Event]:
        if not isinstance(self._open, kind):
            yield from self._close("completed")
            self._open = kind(self._next())
            yield from map(self._numbered, self._open.opening())
        assert self._open is not None
        if piece:
            yield self._numbered(self._open.add(piece))

    def _call(self, piece: CallPiece) -> Iterator[Event]:
        call = self._calls.get(piece.index)
        if call is None:
            yield from self._close("completed")
            call = self._calls[piece.index] = OpenCall(self._next(), piece.id, piece.name)
            yield from map(self._numbered, call.opening())
        if piece.arguments:
            yield self._numbered(call.add(piece.arguments))

    def _close(self, status: str) -> Iterator[Event]:
        if self._open is not None:
            item, self._open = self._open, None
            yield from self._closed(item, status)

    def _closed(self, item: OpenItem, status: str) -> Iterator[Event]:
        yield from map(self._numbered, item.closing(status))
        self._done[item.index] = item.item(status)

    def _next(self) -> int:
        """Return the place of a new item, which counts as some text: their number is bounded too."""
        self._length += _ITEM
        check_length(self._model, self._length)
        self._items += 1
        return self._items - 1

    def _numbered(self, event: Event) -> Event:
        event["sequence_number"] = self._number
        self._number += 1
        return event


def error_of(error: PageinError) -> dict[str, Any]:
    """Return what `ResponseBuilder.fail` says of an error."""
    return {"message": error.message, "code": error.code, "param": error.details.get("param")}


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a chat's usage as a response has it; None where the engine did not say."""
    if usage is None:
        return None
    given, made = _count(usage, "prompt_tokens"), _count(usage, "completion_tokens")
    before, after = usage.get("prompt_tokens_details"), usage.get("completion_tokens_details")
    return {
        "input_tokens": given,
        "input_tokens_details": {**_details(before), "cached_tokens": _count(before, "cached_tokens"),
                                 "cache_write_tokens": _count(before, "cache_write_tokens")},
        "output_tokens": made,
        "output_tokens_details": {**_details(after), "reasoning_tokens": _count(after, "reasoning_tokens")},
        "total_tokens": _count(usage, "total_tokens") or given + made,
    }  # fmt: skip


def _details(value: object) -> Mapping[str, Any]:
    """Pass on what an engine, or Pagein, says beside OpenAI's own counts."""
    return value if isinstance(value, dict) else {}


def _count(value: object, name: str) -> int:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, int) and not isinstance(found, bool) else 0
