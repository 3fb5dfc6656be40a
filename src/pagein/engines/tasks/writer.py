"""One task for one request: texts are written and looked at in a thread of the crew, under one lease of the task."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from pagein.catalog.split.plan import MESSAGE
from pagein.engines.local.fields import refuse
from pagein.engines.local.labels import Labelled, Tagged
from pagein.engines.local.model import Embeddings
from pagein.engines.local.sampling import Sampling
from pagein.engines.local.writer import Deliver, Ending, Message, Prompt, Whose, Writer
from pagein.engines.tasks.answers import labelled, tagged, vector
from pagein.engines.tasks.book import Served
from pagein.engines.tasks.crew import CalledOff, Crew
from pagein.engines.tasks.dice import Dice
from pagein.engines.tasks.house import Guest, House
from pagein.engines.writing.ear import Ear, settings_for, tokens_to_write
from pagein.errors import ContextLengthExceeded

T = TypeVar("T")


class TaskWriter(Writer):
    """What a task answers one request with."""

    def __init__(self, name: str, served: Served, house: House, crew: Crew, guest: Guest) -> None:
        """``name`` is the model's."""
        self._name, self._served, self._house, self._crew, self._guest = name, served, house, crew, guest
        self.context = served.context

    def chat(self, messages: Sequence[Message], template_options: Mapping[str, object]) -> Prompt:
        """Put the last message of the user into the task's prompt; a task without one has its model's template."""
        served = self._served
        if served.prompt is None and served.tokens.has_template:
            return served.tokens.chat(messages, template_options)
        if template_options:
            refuse("chat_template_kwargs", f"task {served.name!r} has no chat template; leave it out")
        last = next((one["content"] for one in reversed(messages) if one["role"] == "user"), None)
        if not last:
            refuse("messages", f"task {served.name!r} answers the last message of the user, and there is none")
        return self.text(last if served.prompt is None else served.prompt.replace(MESSAGE, last))

    def text(self, prompt: str) -> Prompt:
        """Encode a bare prompt."""
        return Prompt(self._served.tokens.encode(prompt, special=True))

    def write(self, prompt: Prompt, sampling: Sampling, deliver: Deliver, whose: Whose) -> Callable[[], None]:
        """Queue a generation for the next thread of the crew; the parts are given back before its end is told."""
        new = tokens_to_write(self._name, len(prompt.tokens), sampling, self.context)
        left = threading.Event()

        def job() -> None:
            try:
                ending = self._generate(prompt, sampling, new, deliver, left.is_set)
            except CalledOff:
                pass
            except Exception as error:
                if not left.is_set():
                    deliver(error)
            else:
                deliver(ending)

        self._crew.put(job)
        return left.set

    def beats(self) -> int:
        """Return the steps of the crew, and the bytes of parts that came in."""
        return self._crew.beats + self._house.parts.bytes_read

    async def embed(self, texts: Sequence[str]) -> Embeddings:
        """Compute one vector per text."""
        found = await self._each(texts, lambda _, inputs, result: (vector(self._served, result), _count(inputs)))
        return Embeddings(np.stack([row for row, _ in found]), sum(count for _, count in found))

    async def classify(self, texts: Sequence[str]) -> list[Labelled]:
        """Compute the labels of each text."""
        return await self._each(texts, lambda _, inputs, result: labelled(self._served, inputs, result))

    async def tag(self, texts: Sequence[str]) -> list[Tagged]:
        """Compute the labels of each text's tokens."""
        return await self._each(texts, lambda text, inputs, result: tagged(self._served, text, inputs, result))

    def _generate(
        self, prompt: Prompt, sampling: Sampling, new: int, deliver: Deliver, left: Callable[[], bool]
    ) -> Ending:
        served, parts = self._served, self._house.parts
        settings = settings_for(served.model.generation_config, sampling, new, served.ends)
        dice = Dice(sampling.seed) if settings.do_sample else None
        ear = _Ear(self._crew, dice, settings.eos_token_id, sampling.stop, served.tokens.decode, deliver)
        lease = self._house.lease(served.name, self._guest, lambda: self._crew.waits(left))
        with self._crew.unless(left), lease, lease.only():
            ids = torch.tensor([prompt.tokens], device=parts.seats.device)
            try:
                parts.model.generate(
                    ids,
                    task=served.name,
                    attention_mask=torch.ones_like(ids),
                    generation_config=settings,
                    logits_processor=LogitsProcessorList([dice] if dice is not None else []),
                    stopping_criteria=StoppingCriteriaList([ear]),
                )
            finally:
                if dice is not None:
                    dice.put_back()
            ear.finish()
        return Ending("stop" if ear.stopped else "length", len(prompt.tokens), ear.count)

    async def _each(self, texts: Sequence[str], read: Callable[[str, Mapping[str, Any], Any], T]) -> list[T]:
        """Call the model with each text, alone, and read its results."""
        inputs = await asyncio.to_thread(lambda: [self._served.tokens.whole(text) for text in texts])
        for one in inputs:
            if _count(one) > self.context:
                raise ContextLengthExceeded(self._name, _count(one), self.context)

        def work(left: Callable[[], bool]) -> list[T]:
            lease = self._house.lease(self._served.name, self._guest, lambda: self._crew.waits(left))
            with self._crew.unless(left), lease, lease.only():
                return [read(text, one, self._call(one)) for text, one in zip(texts, inputs, strict=True)]

        return (await self._crew.run(work)).value

    def _call(self, inputs: Mapping[str, Any]) -> Any:
        self._crew.step()
        parts, served = self._house.parts, self._served
        takes = inspect.signature(served.model.forward).parameters
        given = {name: one.to(parts.seats.device) for name, one in inputs.items() if name in takes}
        if "use_cache" in takes:
            given["use_cache"] = False
        if served.kind == "embed" and served.model.base_model is not served.model:
            given["output_hidden_states"] = True  # what a head returns has none else
            given |= {"logits_to_keep": 1} if "logits_to_keep" in takes else {}
        return parts.model(**given, task=served.name)


class _Ear(Ear):
    """Hears tokens in a thread of the crew."""

    def __init__(self, crew: Crew, dice: Dice | None, *more: Any) -> None:
        super().__init__(*more)
        self._crew, self._dice = crew, dice

    def __call__(self, input_ids: torch.Tensor, scores: Any, **more: Any) -> torch.Tensor:
        if self._dice is not None:
            self._dice.put_back()
        self._crew.step()
        return super().__call__(input_ids, scores, **more)


def _count(inputs: Mapping[str, Any]) -> int:
    return int(inputs["input_ids"].numel())
