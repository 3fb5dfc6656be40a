"""The HTTP side of a model that writes: chat, completions and vectors, several requests at once, whole or as events."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from pagein.engines.local import life
from pagein.engines.local.door import as_failure, problem
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


class Desk:
    """Answers the requests of one model; at most ``parallel`` are held at once, further ones wait unread."""

    def __init__(self, name: str, writer: Writer, parallel: int) -> None:
        self._name, self._writer, self._parallel = name, writer, parallel

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """Answer the paths of what the model can do; called on the event loop."""
        slots = asyncio.Semaphore(self._parallel)
        handlers: dict[Capability, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
            Capability.CHAT: lambda request: self._write(request, read_chat),
            Capability.COMPLETION: lambda request: self._write(request, read_completion),
            Capability.EMBEDDING: self._embed,
        }

        def held(
            handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
        ) -> Callable[..., Awaitable[web.StreamResponse]]:
            async def act(request: web.Request) -> web.StreamResponse:
                async with slots:
                    return await handler(request)

            return act

        for capability in self._writer.capabilities:
            router.add_post(PATHS[capability], held(handlers[capability]))

    async def _embed(self, request: web.Request) -> web.Response:
        wanted, begin = await read_embeddings(request), time.monotonic()
        try:
            found = await life.alive(request, life.Pulse(self._writer.beats), self._writer.embed(wanted.texts))
        except Exception as error:
            raise as_failure(self._name, error) from error
        answer = embeddings_answer(self._name, wanted, found)
        _log("embedding", answer.note, begin)
        return web.Response(body=answer.body, content_type=answer.content_type, charset="utf-8")

    async def _write(
        self, request: web.Request, read: Callable[[web.Request], Awaitable[Wanted]]
    ) -> web.StreamResponse:
        wanted, begin = await read(request), time.monotonic()
        prompt = await asyncio.to_thread(self._prompt, wanted)
        talk = _Talk(self._name)
        call_off = self._writer.write(prompt, wanted.sampling, talk.deliver, _whose(request, wanted))
        shapes, pulse = Shapes(self._name, chat=wanted.messages is not None), life.Pulse(self._writer.beats)
        try:
            if wanted.stream:
                return await self._events(request, wanted, shapes, talk, pulse)
            text = await _whole(request, talk, pulse)
            return web.json_response(shapes.whole(text, talk.ending))
        finally:
            call_off()
            if talk.over is not None:
                _log("completion" if wanted.messages is None else "chat", _note(talk.over), begin)

    def _prompt(self, wanted: Wanted) -> Prompt:
        if wanted.messages is None:
            return self._writer.text(wanted.prompt)
        return self._writer.chat(wanted.messages, wanted.template_options)

    async def _events(
        self, request: web.Request, wanted: Wanted, shapes: Shapes, talk: _Talk, pulse: life.Pulse
    ) -> web.StreamResponse:
        pieces = talk.pieces(life.QUIET)
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


async def _whole(request: web.Request, talk: _Talk, pulse: life.Pulse) -> str:
    """All that is said, with signs of life while nothing is."""
    said: list[str] = []
    async for piece in talk.pieces(life.QUIET):
        if piece is None:
            await life.show_life(request, pulse)
        else:
            said.append(piece)
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
