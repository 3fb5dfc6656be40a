"""A chat whose history the server keeps: the header ``X-Pagein-Session`` names it.

The model sees the history and the new messages; both the new messages and the answer are kept once the answer is
complete, before the client has its last byte. A turn that breaks, or whose client leaves, is not kept at all: the same
request can then simply be sent again. Messages stay as they came, so that the next prompt begins with the same tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Awaitable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from aiohttp import web

from pagein.errors import BadRequest, StateOff
from pagein.gateway import sse
from pagein.gateway.call import Call
from pagein.gateway.chat_answer import Told, piece_of_event, whole_answer
from pagein.gateway.kept_reply import KeptReply
from pagein.gateway.kept_turns import KeptTurns
from pagein.gateway.openai import json_object
from pagein.gateway.reply import Reply
from pagein.gateway.session_ports import Sessions
from pagein.gateway.tasks import Asked
from pagein.history import Entry, Past, Shape, ThreadKind, new_id
from pagein.protocol import Capability

HEADER = "X-Pagein-Session"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}")
_SYSTEM = ("system", "developer")


class ChatSessions:
    """Serves the chats that name a session."""

    def __init__(self, turns: KeptTurns) -> None:
        self._turns = turns

    async def serve(self, request: web.Request, reading: Awaitable[Call]) -> web.StreamResponse:
        """Answer one turn of the session that the request names."""
        sessions = self._turns.sessions
        if sessions is None:
            return await self._turns.proxy.serve(request, _refuse(reading), Reply(request))
        reply = _SessionReply(request, sessions, self._turns.tenant(request))
        return await self._turns.serve(request, reply, partial(self._read, request, reading, reply))

    async def _read(
        self, request: web.Request, reading: Awaitable[Call], reply: _SessionReply, turn: ExitStack
    ) -> Call:
        """Read the request, wait for the turns before it, and put the history before its messages."""
        call = await reading
        name = request.headers[HEADER]
        if _NAME.fullmatch(name) is None:
            raise BadRequest(
                f"{HEADER} must begin with a letter or a digit, go on with those or . _ : @ - "
                "and have at most 128 of them"
            )
        fields, fresh = _read_messages(call)
        limit = self._turns.limit
        past, since = await self._turns.open(
            reply, turn, name, call.stream, lambda sessions: sessions.past_of_session(reply.tenant, name, limit)
        )
        new = reply.begin(call, name, past, fresh)
        fields["messages"] = [*reply.history, *new]
        body = json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")
        return replace(call, body=body, turn=reply.take_up(Asked(call.model, call.task).name, past, since, "sess"))


class _SessionReply(KeptReply):
    """Passes a chat's answer on as it is, and keeps it."""

    def __init__(self, request: web.Request, sessions: Sessions, tenant: str) -> None:
        super().__init__(request, sessions, tenant)
        self.history: list[Mapping[str, Any]] = []
        self._fresh: Sequence[dict[str, Any]] = ()
        self._name, self._told = "", Told("")

    def begin(self, call: Call, name: str, past: Past | None, fresh: list[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Take in what is asked, and return the messages that are new: not the system's where the history has it."""
        self._name, self._told = name, Told(call.model)
        self.history = [_sent(entry.body) for entry in past.entries] if past is not None else []
        if self.history and fresh[0].get("role") in _SYSTEM and dict(self.history[0]) == fresh[0]:
            fresh = fresh[1:]
        if not fresh:
            raise BadRequest("`messages` has nothing new for this session", param="messages")
        self._fresh = fresh
        return fresh

    async def on_whole(self, body: bytes) -> bytes:
        """Keep the message of a whole answer."""
        message, _ = whole_answer(self.model, body)
        await self._keep(message)
        return body

    async def on_event(self, raw: bytes, data: bytes) -> bytes:
        """Pass all but the end, which waits until the turn is kept."""
        if data == sse.END:
            return b""
        if data:
            self._told.add(piece_of_event(data))
        return raw

    async def on_end(self) -> bytes:
        """Keep the turn, unless it ended with an error."""
        if self._told.failed:
            return b""
        await self._keep(self._told.message())
        return b"data: " + sse.END + b"\n\n"

    async def _keep(self, message: dict[str, Any]) -> None:
        said = [Entry(new_id("msg"), body, Shape.MESSAGE) for body in self._fresh]
        answer = Entry(new_id("msg"), message, Shape.MESSAGE, output=True)
        await self.keep(ThreadKind.SESSION, (*said, answer), name=self._name)


async def _refuse(reading: Awaitable[Call]) -> Call:
    await reading
    raise StateOff(HEADER)


def _read_messages(call: Call) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    if call.capability is not Capability.CHAT:
        raise BadRequest(f"{HEADER} is for a chat, not for {call.capability}")
    fields: dict[str, Any] = json_object(call.body)
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(item, dict) for item in messages):
        raise BadRequest("`messages` must be a list of at least one message", param="messages")
    if fields.get("n") not in (None, 1):
        raise BadRequest("a session takes one answer a turn: leave `n` out", param="n")
    return fields, messages


def _sent(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Leave out what an engine said as "nothing" in its answer, and what it refuses to be told again."""
    return {key: value for key, value in message.items() if value is not None or key == "content"}
