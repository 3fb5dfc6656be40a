"""A transformers model as a `Writer`: prompts, requests in the hub's line, vectors."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from pagein.engines.local.fields import refuse
from pagein.engines.local.model import Embeddings, Floats
from pagein.engines.local.sampling import Sampling
from pagein.engines.local.writer import Deliver, Ending, Message, Prompt, Whose, Writer
from pagein.engines.writing.conversations import Conversations
from pagein.engines.writing.hub import Hub
from pagein.engines.writing.request import Request, settings_for
from pagein.engines.writing.vectors import Body
from pagein.errors import ContextLengthExceeded
from pagein.protocol import Capability
from pagein.weights.lockstep import Left, Seat

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
        tokeniser: Any,
        hub: Hub,
        guard: Guard,
        body: Body,
        context: int,
        conversations: Conversations | None = None,
    ) -> None:
        self._name, self._model, self._tokeniser, self._hub, self._guard = name, model, tokeniser, hub, guard
        self._body, self.context, self._conversations = body, context, conversations
        self._ends = _ends(model, tokeniser)
        self._lock = threading.Lock()  # a tokeniser changes while it encodes
        self.capabilities = capabilities_of(model, tokeniser)

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        """Render the template; its faults are the request's."""
        try:
            with self._lock:
                text = self._tokeniser.apply_chat_template(
                    list(messages), tokenize=False, add_generation_prompt=True, **template_options
                )
        except Exception as error:  # a template raises what it likes
            refuse("messages", f"the chat template of {self._name!r} refuses these messages: {str(error)[:300]}")
        return Prompt(self._encode(text, special=False))

    def text(self, prompt: str) -> Prompt:
        """Encode a bare prompt."""
        return Prompt(self._encode(prompt, special=True))

    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver, whose: Whose) -> Callable[[], None]:
        """Queue a generation; it joins once there is room for its prompt, and what it lacks then others yield."""
        count = len(prompt.tokens)
        if count >= self.context:
            raise ContextLengthExceeded(self._name, count, self.context)
        new = sampling.max_tokens if sampling.max_tokens is not None else self.context - count
        if count + new > self.context:
            raise ContextLengthExceeded(self._name, count + new, self.context, "max_tokens")
        settings = settings_for(self._model.generation_config, sampling, new, self._ends)
        told = self._conversations
        if told is not None and not told.has_encoder:
            told.check(count + new)
        request = Request(self._model, prompt, sampling, settings, self._decode, deliver, told, whose)

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
        tokens = await asyncio.to_thread(lambda: [self._encode(text, special=True) for text in texts])
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

    def _encode(self, text: str, *, special: bool) -> tuple[int, ...]:
        with self._lock:
            tokens = self._tokeniser(text, add_special_tokens=special)["input_ids"]
        if not tokens:
            refuse("prompt", "the text has no tokens")
        return tuple(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokeniser.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def capabilities_of(model: Any, tokeniser: Any) -> list[Capability]:
    """What a model can be asked for."""
    if not model.can_generate():
        return [Capability.EMBEDDING]
    chat = [Capability.CHAT] if tokeniser.chat_template is not None else []
    return [*chat, Capability.COMPLETION, Capability.EMBEDDING]


def _ends(model: Any, tokeniser: Any) -> list[int]:
    """The tokens that end a text: those of the model's settings, else the tokeniser's."""
    settings = getattr(model, "generation_config", None)
    told = settings.eos_token_id if settings is not None else None
    told = tokeniser.eos_token_id if told is None else told
    return [] if told is None else [int(one) for one in (told if isinstance(told, list | tuple) else [told])]


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
