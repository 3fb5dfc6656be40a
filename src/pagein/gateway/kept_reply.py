"""A reply that takes a chat's answer in while it passes, and keeps the turn before the client has its last byte."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from aiohttp import web

from pagein.errors import BadAnswer
from pagein.gateway import sse
from pagein.gateway.chat_answer import check_length
from pagein.gateway.reply import Reply
from pagein.gateway.session_ports import Sessions
from pagein.history import Answered, Entry, Past, ThreadKind, Turn, TurnOf, new_id

CONVERSATION_HEADER = "X-Pagein-Conversation"
HISTORY_HEADER = "X-Pagein-History"
_JSON = "application/json"


class KeptReply(Reply, ABC):
    """What a client has in full is stored; what broke, or was left before its end, leaves no trace."""

    def __init__(self, request: web.Request, sessions: Sessions | None, tenant: str) -> None:
        super().__init__(request)
        self.model = ""
        self.tenant = tenant
        self._sessions = sessions
        self._thread, self._begins, self._kept = "", False, False
        self._long: bytearray | None = None
        self._status = 200

    def take_up(self, model: str, past: Past | None, since: float, prefix: str | None) -> TurnOf | None:
        """Take in what goes before a turn, read ``since`` then, and return whose turn it is.

        Without a past a conversation begins, whose id has this prefix; None: it is not to be kept, and is nobody's.
        """
        self.model = model
        self.tell(HISTORY_HEADER, history_words(past, model))
        if past is None and prefix is None:
            return None
        self._begins = past is None
        self._thread = past.thread if past is not None else new_id(str(prefix))
        self.tell(CONVERSATION_HEADER, self._thread)
        return TurnOf(self._thread, since)

    async def keep(
        self, kind: ThreadKind, entries: Sequence[Entry], name: str | None = None, answered: Answered | None = None
    ) -> None:
        """Store the turn that was taken up; raises PageinError."""
        assert self._sessions is not None
        turn = Turn(self._thread, kind, self.model, tuple(entries), name, answered, self._begins)
        await self._sessions.keep(self.tenant, turn)
        self._kept = True

    def close(self) -> None:
        """It is over, however it ended: a conversation that was to begin with it begins only if it was kept."""
        if self._begins and not self._kept and self._sessions is not None:
            self._sessions.abandon(self.tenant, self._thread)

    @abstractmethod
    async def on_whole(self, body: bytes) -> bytes:
        """Take a whole answer in, keep the turn, and return what the client gets; raises PageinError."""

    @abstractmethod
    async def on_event(self, raw: bytes, data: bytes) -> bytes:
        """Take one event in and return what the client gets for it."""

    @abstractmethod
    async def on_end(self) -> bytes:
        """Keep the turn whose events are complete, and return the last ones; raises PageinError."""

    async def whole(self, status: int, content_type: str, body: bytes) -> web.StreamResponse:
        """Send a complete answer, or an error as it is."""
        if status < 400:
            body = await self.on_whole(body)
        return await super().whole(status, content_type, body)

    async def open(self, status: int, content_type: str, length: int | None = None) -> None:
        """Begin a stream of events; an answer in JSON that is too long for one piece is collected instead."""
        if content_type.startswith(sse.CONTENT_TYPE):
            await super().open(status, content_type)
        else:
            self._long, self._status = bytearray(), status

    async def write(self, chunk: bytes) -> None:
        """Take complete events in and send what becomes of them."""
        if self._long is not None:
            self._long += chunk
            check_length(self.model, len(self._long))
            return
        passed = b"".join([await self.on_event(raw, data) for raw, data in sse.split(chunk)])
        if passed:
            await self._send(passed)

    async def end(self) -> web.StreamResponse:
        """Keep the turn, and then end the answer."""
        if self._long is not None:
            body, self._long = bytes(self._long), None
            return await self.whole(self._status, _JSON, body)
        if not self.begun:
            raise BadAnswer(f"the worker of {self.model!r} sent no answer", model=self.model)
        if last := await self.on_end():
            await self._send(last)
        return await super().end()


def history_words(past: Past | None, model: str) -> str:
    """Return what the header says of the history: its entries, and whether another model computes it anew."""
    if past is None or not past.entries:
        return "0"
    if past.model is not None and past.model != model:
        return f"{len(past.entries)}; recomputed; last-model={past.model}"
    return str(len(past.entries))
