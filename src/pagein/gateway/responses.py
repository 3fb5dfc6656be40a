"""``/v1/responses``: a response is a chat with the history before it, answered in OpenAI's newer shape, and kept.

A response runs on the way of every chat: lease, queue, heartbeats, errors. What is stored is stored before the client
has the last byte, so an answered response survives whatever comes; one that broke, or was left, is not kept.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from aiohttp import web

from pagein.errors import BadRequest, StateOff
from pagein.gateway import sse
from pagein.gateway.call import Call, read_body
from pagein.gateway.chat_answer import piece_of_event, whole_answer
from pagein.gateway.kept_reply import KeptReply
from pagein.gateway.kept_turns import KeptTurns
from pagein.gateway.pages import page_json, read_span
from pagein.gateway.ports import Desk
from pagein.gateway.response_builder import ResponseBuilder
from pagein.gateway.response_items import Event
from pagein.gateway.response_request import ResponseRequest, read_response
from pagein.gateway.session_ports import Sessions
from pagein.history import Answered, Entry, Past, ThreadKind, new_id
from pagein.protocol import Capability


class Responses:
    """Handlers that answer, show and delete responses."""

    def __init__(self, turns: KeptTurns, desk: Desk) -> None:
        self._turns, self._tenant, self._desk = turns, turns.tenant, desk

    def routes(self) -> list[web.RouteDef]:
        """Return every path of this class."""
        return [
            web.post("/v1/responses", self.create),
            web.get("/v1/responses/{id}", self.show),
            web.delete("/v1/responses/{id}", self.remove),
            web.get("/v1/responses/{id}/input_items", self.inputs),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        """Answer a request, and keep the turn unless it says otherwise."""
        reply = _ResponseReply(request, self._turns.sessions, self._tenant(request))
        return await self._turns.serve(request, reply, partial(self._read, request, reply))

    async def show(self, request: web.Request) -> web.Response:
        """Return a stored response, whole."""
        if request.query.get("stream") == "true":
            raise BadRequest("a stored response is not streamed again: leave `stream` out", param="stream")
        found = await self._kept("GET /v1/responses").response(self._tenant(request), request.match_info["id"])
        return web.json_response(found.body)

    async def remove(self, request: web.Request) -> web.Response:
        """Delete a stored response."""
        identity = request.match_info["id"]
        await self._kept("DELETE /v1/responses").remove_response(self._tenant(request), identity)
        return web.json_response({"id": identity, "object": "response", "deleted": True})

    async def inputs(self, request: web.Request) -> web.Response:
        """List the input of a stored response."""
        kept, span = self._kept("GET /v1/responses"), read_span(request)
        return page_json(await kept.inputs(self._tenant(request), request.match_info["id"], span))

    def _kept(self, what: str) -> Sessions:
        if self._turns.sessions is None:
            raise StateOff(what)
        return self._turns.sessions

    async def _read(self, request: web.Request, reply: _ResponseReply, turn: ExitStack) -> Call:
        wish = read_response(await read_body(request, self._turns.limit), self._desk)
        reply.stream = wish.stream
        past, since = await self._past(wish, reply, turn)
        reply.begin(wish, past)
        whose = reply.take_up(wish.asked.name, past, since, "chain" if reply.store else None)
        body = wish.chat_body(past.entries if past is not None else ())
        model, task = wish.asked.model, wish.asked.task
        shape = (body, "application/json", wish.stream, wish.wishes, whose)
        return Call(model, Capability.CHAT, *shape, task=task, user=wish.user)

    async def _past(self, wish: ResponseRequest, reply: _ResponseReply, turn: ExitStack) -> tuple[Past | None, float]:
        """Return what goes before; turns of one conversation wait for each other, branches of a response do not."""
        if self._turns.sessions is None:
            wishes = {"store": wish.store, "previous_response_id": wish.previous, "conversation": wish.conversation}
            for field, value in wishes.items():
                if value:
                    raise StateOff(f"`{field}`")

        async def past(sessions: Sessions) -> Past | None:
            if wish.previous is not None:
                return await sessions.past_of_response(reply.tenant, wish.previous, self._turns.limit)
            if wish.conversation is None:
                return None
            return await sessions.past_of_conversation(reply.tenant, wish.conversation, self._turns.limit)

        line = wish.conversation if wish.previous is None else None
        return await self._turns.open(reply, turn, line, wish.stream, past)


class _ResponseReply(KeptReply):
    """Turns a chat's answer into a response, and keeps it."""

    def __init__(self, request: web.Request, sessions: Sessions | None, tenant: str) -> None:
        super().__init__(request, sessions, tenant)
        self.stream = False
        self._past: Past | None = None
        self._wish: ResponseRequest | None = None
        self._builder = ResponseBuilder(new_id("resp"), "", {})
        self._failed = False
        self.store = False
        """The response is to be kept."""

    def begin(self, wish: ResponseRequest, past: Past | None) -> None:
        """Take in what is asked and what goes before it."""
        self._wish, self._past = wish, past
        self.store = self._sessions is not None and wish.store is not False
        told = {
            **wish.shown,
            "instructions": wish.instructions,
            "metadata": dict(wish.metadata),
            "previous_response_id": wish.previous,
            "conversation": {"id": wish.conversation} if wish.conversation is not None else None,
            "max_tool_calls": None,
            "store": self.store,
        }
        self._builder = ResponseBuilder(self._builder.id, wish.asked.name, told)

    async def on_whole(self, body: bytes) -> bytes:
        """Return the response for a whole answer, once it is kept."""
        _, piece = whole_answer(self.model, body)
        for _ in (*self._builder.add(piece), *self._builder.finish()):
            pass
        await self._keep()
        return sse.to_json(self._builder.response())

    async def on_event(self, raw: bytes, data: bytes) -> bytes:
        """Translate one event of the chat; comments pass."""
        if self._failed or data == sse.END:
            return b""
        if not data:
            return raw
        piece = piece_of_event(data)
        if piece.error is not None:
            self._failed = True
            return _encode(self._builder.fail(500, piece.error))
        return b"".join(map(_encode, self._builder.add(piece)))

    async def on_end(self) -> bytes:
        """Close the items, keep the turn, and say that it is complete."""
        if self._failed:
            return b""
        closing = b"".join(map(_encode, self._builder.finish()))
        await self._send(closing)
        await self._keep()
        return _encode(self._builder.last())

    async def _fail_stream(self, value: dict[str, Any]) -> web.StreamResponse:
        """End the stream as clients of responses read it."""
        error, self._failed = value.get("error", {}), True
        await self._send(_encode(self._builder.fail(_status_of(error), error)))
        return await self.end()

    async def _keep(self) -> None:
        if not self.store:
            return
        assert self._wish is not None
        output = tuple(Entry(item["id"], item, output=True) for item in self._builder.output)
        kind = self._past.kind if self._past is not None else ThreadKind.CHAIN
        answered = Answered(self._builder.id, self._wish.previous, self._builder.response())
        await self.keep(kind, (*self._wish.entries, *output), answered=answered)


def _encode(event: Event) -> bytes:
    return sse.event(event, name=event["type"])


def _status_of(error: dict[str, Any]) -> int:
    """A stream's status was sent long ago; its error's type says what it would have been."""
    return {"rate_limit_error": 429, "invalid_request_error": 400}.get(str(error.get("type")), 500)
