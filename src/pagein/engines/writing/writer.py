"""A transformers model as a `Writer`: prompts, requests in the hub's line, vectors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pagein.engines.local.model import Embeddings, Floats
from pagein.engines.local.sampling import Sampling
from pagein.engines.local.writer import Deliver, Ending, Message, Prompt, Whose, Writer
from pagein.engines.writing.conversations import Conversations
from pagein.engines.writing.ear import ends_of, settings_for, tokens_to_write
from pagein.engines.writing.hub import Hub
from pagein.engines.writing.request import Request
from pagein.engines.writing.tokens import Tokens
from pagein.engines.writing.vectors import Body
from pagein.errors import ContextLengthExceeded
from pagein.protocol import Capability
from pagein.weights.steps.lockstep import Left, Seat

AT_ONCE = 32
"""Texts of one request for vectors that share a pass over the weights."""


class Guard(Protocol):
    """Asked before a request begins to compute."""

    def check(self) -> None:
        """Raise where the model cannot compute now."""
        ...


class TransformersWriter(Writer):
    """Chat, completions and vectors of one loaded model."""

    def __init__(
        self,
        name: str,
        model: Any,
        tokens: Tokens,
        hub: Hub,
        guard: Guard,
        body: Body,
        context: int,
        conversations: Conversations | None = None,
    ) -> None:
        self._name, self._model, self._tokens, self._hub, self._guard = name, model, tokens, hub, guard
        self._body, self.context, self._conversations = body, context, conversations
        self._ends = ends_of(model, tokens.tokeniser)
        self.capabilities = capabilities_of(model, tokens)

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        """Render the template; its faults are the request's."""
        return self._tokens.chat(messages, template_options)

    def text(self, prompt: str) -> Prompt:
        """Encode a bare prompt."""
        return Prompt(self._tokens.encode(prompt, special=True))

    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver, whose: Whose) -> Callable[[], None]:
        """Queue a generation; it joins once there is room for its prompt, and what it lacks then others yield."""
        count = len(prompt.tokens)
        new = tokens_to_write(self._name, count, sampling, self.context)
        settings = settings_for(self._model.generation_config, sampling, new, self._ends)
        told = self._conversations
        if told is not None and not told.has_encoder:
            told.check(count + new)
        request = Request(self._model, prompt, sampling, settings, self._tokens.decode, deliver, told, whose)

        def job() -> Ending:
            self._guard.check()
            return request()

        seat = self._hub.submit(job, count + new, lambda seat: _tell(seat, deliver), self._room_for(count, new))
        return lambda: self._hub.cancel(seat)

    def beats(self) -> int:
        """Return the steps of the compute thread."""
        return self._hub.beats

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Compute the texts some at a time, each of them as if alone."""
        tokens = await asyncio.to_thread(lambda: [self._tokens.encode(text, special=True) for text in texts])
        for one in tokens:
            if len(one) > self.context:
                raise ContextLengthExceeded(self._name, len(one), self.context)
        rows: list[Floats] = []
        for at in range(0, len(tokens), AT_ONCE):
            rows += await self._vectors(tokens[at : at + AT_ONCE])
        return Embeddings(np.stack(rows), sum(map(len, tokens)))

    async def _vectors(self, tokens: Sequence[tuple[int, ...]]) -> list[Floats]:
        ends = [_Result() for _ in tokens]
        seats = [
            self._hub.submit(self._vector_of(one), len(one), end.take, self._room_for(len(one), 0))
            for one, end in zip(tokens, ends, strict=True)
        ]
        try:
            return [await end.value for end in ends]
        finally:
            for seat in seats:
                self._hub.cancel(seat)

    def _room_for(self, prompt: int, new: int) -> Callable[[], bool] | None:
        told = self._conversations
        return None if told is None or told.has_encoder else lambda: told.turns.may_begin(prompt, new)

    def _vector_of(self, tokens: tuple[int, ...]) -> Callable[[], Floats]:
        def job() -> Floats:
            self._guard.check()
            return self._body.vector(list(tokens))

        return job


def capabilities_of(model: Any, tokens: Tokens) -> list[Capability]:
    """What a model can be asked for."""
    if not model.can_generate():
        return [Capability.EMBEDDING]
    chat = [Capability.CHAT] if tokens.has_template else []
    return [*chat, Capability.COMPLETION, Capability.EMBEDDING]


def _tell(seat: Seat[Ending], deliver: Deliver) -> None:
    """Deliver how a request ended; of one that was called off nobody wants to hear."""
    try:
        deliver(seat.result())
    except Left:
        pass
    except Exception as error:
        deliver(error)


class _Result:
    """What a seat returns, on the event loop that made this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[Floats] = self._loop.create_future()

    @property
    def value(self) -> Awaitable[Floats]:
        """The result, once it is there."""
        return self._future

    def take(self, seat: Seat[Floats]) -> None:
        """Called in the compute thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._settle, seat)

    def _settle(self, seat: Seat[Floats]) -> None:
        if self._future.done():
            return
        try:
            self._future.set_result(seat.result())
        except Left:
            self._future.cancel()
        except Exception as error:
            self._future.set_exception(error)
