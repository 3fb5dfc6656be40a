"""The HTTP side of a model that writes: chat, completions and vectors, several requests at once, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from aiohttp import web

from pagein.engines.local import life
from pagein.engines.local.answer import Answer
from pagein.engines.local.door import Handler, as_failure, problem
from pagein.engines.local.prompts import Wanted, read_chat, read_completion
from pagein.engines.local.replies import DONE, Shapes, fault
from pagein.engines.local.texts import embeddings_answer, read_embeddings
from pagein.engines.local.writer import Ending, Prompt, Whose, Writer
from pagein.errors import PageinError
from pagein.protocol import KV_CONVERSATION_HEADER, KV_TENANT_HEADER, PATHS, Capability
from pagein.units import format_duration

_EVENTS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
_STILL_THERE = b": computing\n\n"
_Item = str | Ending | Exception
T = TypeVar("T")
W = TypeVar("W", bound=Writer)


class WriterDesk(ABC, Generic[W]):
    """Answers requests for text and for vectors; at most ``parallel`` are held at once, further ones wait unread."""

    def __init__(self, name: str, parallel: int) -> None:
        self.name, self._parallel = name, parallel

    @abstractmethod
    def writer_for(self, request: web.Request, capability: Capability) -> W:
        """Return what answers a request; raises PageinError."""

    @abstractmethod
    def beats(self) -> int:
        """Return a number that grows while something is computed: whoever waits can tell that from a hang."""

    def handlers(self) -> dict[Capability, Handler]:
        """Return what answers each path."""
        return {
            Capability.CHAT: lambda request: self._write(request, Capability.CHAT, read_chat),
            Capability.COMPLETION: lambda request: self._write(request, Capability.COMPLETION, read_completion),
            Capability.EMBEDDING: self._embed,
        }

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Answer the paths; called on the event loop."""
        slots = asyncio.Semaphore(self._parallel)

        def held(handler: Handler) -> Callable[..., Awaitable[web.StreamResponse]]:
            async def act(request: web.Request) -> web.StreamResponse:
                async with slots:
                    return await handler(request)

            return act

        for capability, handler in self.handlers().items():
            router.add_post(PATHS[capability], held(handler))

    async def _embed(self, request: web.Request) -> web.Response:
        capability = Capability.EMBEDDING
        writer = self.writer_for(request, capability)
        wanted = await read_embeddings(request)
        found = writer.embed(wanted.texts)
        return await self.answered(request, capability, found, lambda one: embeddings_answer(self.name, wanted, one))

    async def answered(
        self, request: web.Request, capability: Capability, work: Awaitable[T], answer: Callable[[T], Answer]
    ) -> web.Response:
        """Wait for a result, with signs of life, and answer with it."""
        begin = time.monotonic()
        try:
            found = await life.alive(request, life.Pulse(self.beats), work)
        except Exception as error:
            raise as_failure(self.name, error) from error
        made = answer(found)
        _log(capability, made.note, begin)
        return web.Response(body=made.body, content_type=made.content_type, charset="utf-8")

    async def _write(
        self, request: web.Request, capability: Capability, read: Callable[[web.Request], Awaitable[Wanted]]
    ) -> web.StreamResponse:
        writer = self.writer_for(request, capability)
        wanted, begin = await read(request), time.monotonic()
        prompt = await asyncio.to_thread(_prompt, writer, wanted)
        talk = _Talk(self.name)
        call_off = writer.write(prompt, wanted.sampling, talk.deliver, _whose(request, wanted))
        shapes, pulse = Shapes(self.name, chat=wanted.messages is not None), life.Pulse(self.beats)
        try:
            if wanted.stream:
                return await self._events(request, wanted, shapes, talk, pulse)
            text = await _whole(request, talk, pulse)
            return web.json_response(shapes.whole(text, talk.ending))
        finally:
            call_off()
            if talk.over is not None:
                _log("completion" if wanted.messages is None else "chat", _note(talk.over), begin)

    async def _events(
        self, request: web.Request, wanted: Wanted, shapes: Shapes, talk: _Talk, pulse: life.Pulse
    ) -> web.StreamResponse:
        pieces = talk.pieces(life.quiet(request))
        first = await anext(pieces, None)  # a fault before the first word has a status of its own
        response = web.StreamResponse(headers=_EVENTS)
        await response.prepare(request)
        if (opening := shapes.first()) is not None:
            await response.write(opening)
        try:
            if first is not None or talk.over is None:
                await response.write(_STILL_THERE if first is None else shapes.piece(first))
            async for piece in pieces:
                if piece is not None or pulse.beat():
                    await response.write(_STILL_THERE if piece is None else shapes.piece(piece))
        except PageinError as error:
            await response.write(fault(problem(error)))
            await response.write_eof()
            return response
        await response.write(shapes.last(talk.ending))
        if wanted.with_usage:
            await response.write(shapes.counts(talk.ending))
        await response.write(DONE)
        await response.write_eof()
        return response


class Desk(WriterDesk[Writer]):
    """Answers the requests of one model."""

    def __init__(self, name: str, writer: Writer, parallel: int) -> None:
        super().__init__(name, parallel)
        self._writer = writer

    def writer_for(self, request: web.Request, capability: Capability) -> Writer:
        """Return the one that there is."""
        return self._writer

    def beats(self) -> int:
        """Return the writer's."""
        return self._writer.beats()

    def handlers(self) -> dict[Capability, Handler]:
        """Return what answers the paths of what the model can do."""
        every = super().handlers()
        return {capability: every[capability] for capability in self._writer.capabilities}


def _prompt(writer: Writer, wanted: Wanted) -> Prompt:
    if wanted.messages is None:
        return writer.text(wanted.prompt)
    return writer.chat(wanted.messages, wanted.template_options)


async def _whole(request: web.Request, talk: _Talk, pulse: life.Pulse) -> str:
    """All that is said, with signs of life meanwhile: of what is said the client gets nothing before the end."""
    said: list[str] = []
    quiet, now = life.quiet(request), asyncio.get_running_loop().time
    due = now() + quiet
    async for piece in talk.pieces(quiet):
        if piece is not None:
            said.append(piece)
        if piece is None or now() >= due:
            await life.show_life(request, pulse)
            due = now() + quiet
    return "".join(said)


def _whose(request: web.Request, wanted: Wanted) -> Whose:
    """Read the daemon's headers: nobody else reaches the socket, and the gateway passes none of a client's on."""
    headers = request.headers
    return Whose(headers.get(KV_TENANT_HEADER, ""), headers.get(KV_CONVERSATION_HEADER), wanted.reuse)


def _note(over: Ending) -> str:
    known = f", {over.reused.cached} of them known" if over.reused is not None else ""
    return f"{over.prompt_tokens} tokens read{known}, {over.completion_tokens} written"


class _Talk:
    """What the compute thread says, on the event loop."""

    def __init__(self, model: str) -> None:
        self.over: Ending | None = None
        self._model = model
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[_Item] = asyncio.Queue()

    def deliver(self, item: _Item) -> None:
        """Called in the compute thread; nobody listens any more once the loop is closed."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)

    @property
    def ending(self) -> Ending:
        """How it ended."""
        assert self.over is not None, "it is still talking"
        return self.over

    async def pieces(self, quiet: float) -> AsyncIterator[str | None]:
        """Yield text to the end, and None after each ``quiet`` seconds without; raises what came in its place."""
        while True:
            try:
                async with asyncio.timeout(quiet):
                    item = await self._items.get()
            except TimeoutError:
                yield None
                continue
            if isinstance(item, Exception):
                raise as_failure(self._model, item) from item
            if isinstance(item, Ending):
                self.over = item
                return
            yield item


def _log(what: str, note: str, begin: float) -> None:
    """One line to the model's log, beside the daemon's own about this request."""
    print(f"{what}: {note} in {format_duration(time.monotonic() - begin)}", flush=True)
