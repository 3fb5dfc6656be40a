"""The items of a response while they are said: reasoning, a message, calls of tools, each with its own events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar

from pagein.history import new_id

Event = dict[str, Any]


class OpenItem(ABC):
    """One item of the output: opened by its first piece, closed once."""

    prefix: ClassVar[str]

    def __init__(self, index: int) -> None:
        self.id = new_id(self.prefix)
        self.index = index
        self._pieces: list[str] = []

    @abstractmethod
    def item(self, status: str) -> dict[str, Any]:
        """Return the item as it stands."""

    @abstractmethod
    def opening(self) -> Iterator[Event]:
        """Yield the events that come before the first piece."""

    @abstractmethod
    def closing(self, status: str) -> Iterator[Event]:
        """Yield the events that come after the last piece."""

    @abstractmethod
    def _delta(self, piece: str) -> Event:
        """Return the event of one piece."""

    def add(self, piece: str) -> Event:
        """Take a piece in and return its event."""
        self._pieces.append(piece)
        return self._delta(piece)

    @property
    def said(self) -> str:
        """All pieces."""
        return "".join(self._pieces)

    def _event(self, kind: str, **more: Any) -> Event:
        return {"type": kind, "item_id": self.id, "output_index": self.index, **more}

    def _added(self) -> Event:
        item = self.item("in_progress")
        return {"type": "response.output_item.added", "output_index": self.index, "item": item}

    def _done(self, status: str) -> Event:
        return {"type": "response.output_item.done", "output_index": self.index, "item": self.item(status)}


class OpenMessage(OpenItem):
    """What the model answers."""

    prefix = "msg"
    _begun = False

    def item(self, status: str) -> dict[str, Any]:
        """Return the message."""
        content = [self._part(self.said)] if self._begun else []
        return {"id": self.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def opening(self) -> Iterator[Event]:
        """Yield the empty message and its one part."""
        yield self._added()
        self._begun = True
        yield self._event("response.content_part.added", content_index=0, part=self._part(""))

    def closing(self, status: str) -> Iterator[Event]:
        """Yield the whole text, the part and the message."""
        yield self._event("response.output_text.done", content_index=0, text=self.said, logprobs=[])
        yield self._event("response.content_part.done", content_index=0, part=self._part(self.said))
        yield self._done(status)

    def _delta(self, piece: str) -> Event:
        return self._event("response.output_text.delta", content_index=0, delta=piece, logprobs=[])

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


class OpenReasoning(OpenItem):
    """What the model thinks before it answers."""

    prefix = "rs"
    _begun = False

    def item(self, status: str) -> dict[str, Any]:
        """Return the reasoning."""
        content = [self._part(self.said)] if self._begun else []
        return {"id": self.id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def opening(self) -> Iterator[Event]:
        """Yield the empty reasoning and its one part."""
        yield self._added()
        self._begun = True
        yield self._event("response.content_part.added", content_index=0, part=self._part(""))

    def closing(self, status: str) -> Iterator[Event]:
        """Yield the whole text, the part and the reasoning."""
        yield self._event("response.reasoning_text.done", content_index=0, text=self.said)
        yield self._event("response.content_part.done", content_index=0, part=self._part(self.said))
        yield self._done(status)

    def _delta(self, piece: str) -> Event:
        return self._event("response.reasoning_text.delta", content_index=0, delta=piece)

    @staticmethod
    def _part(text: str) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": text}


class OpenCall(OpenItem):
    """A call of one of the client's functions."""

    prefix = "fc"

    def __init__(self, index: int, call: str, name: str) -> None:
        super().__init__(index)
        self._call = call or new_id("call")
        self.name = name

    def item(self, status: str) -> dict[str, Any]:
        """Return the call."""
        return {
            "id": self.id, "type": "function_call", "status": status, "call_id": self._call, "name": self.name,
            "arguments": self.said,
        }  # fmt: skip

    def opening(self) -> Iterator[Event]:
        """Yield the call without its arguments."""
        yield self._added()

    def closing(self, status: str) -> Iterator[Event]:
        """Yield the whole arguments and the call."""
        yield self._event("response.function_call_arguments.done", name=self.name, arguments=self.said)
        yield self._done(status)

    def _delta(self, piece: str) -> Event:
        return self._event("response.function_call_arguments.delta", delta=piece)
