"""How ``generate`` is asked and listened to: the settings of a request, an ear for each token as it is chosen."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria

from pagein.engines.local.sampling import Sampling
from pagein.engines.local.stops import StopFinder
from pagein.engines.local.writer import Deliver
from pagein.engines.writing.detokenise import Detokeniser
from pagein.errors import ContextLengthExceeded


class Ear(StoppingCriteria):
    """Hears every token as it is chosen, and ends the generation at a stop string."""

    def __init__(
        self,
        ends: Sequence[int],
        stops: Sequence[str],
        decode: Callable[[Sequence[int]], str],
        deliver: Deliver,
    ) -> None:
        self.count = 0
        """Tokens so far, the one that ended the text included."""
        self.first_at: float | None = None
        """Monotonic seconds when the first one was there."""
        self.stopped = False
        """The model ended the text, or a stop string came."""
        self._ends = frozenset(ends)
        self._text, self._stops, self._deliver = Detokeniser(decode), StopFinder(stops), deliver

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Hear the last token and tell whether the text ends; what comes after its end is none of it."""
        if self.stopped:
            return torch.tensor([True], device=input_ids.device)
        token = int(input_ids[0, -1])
        self.count += 1
        if self.first_at is None:
            self.first_at = monotonic()
        if token in self._ends:
            self.stopped = True
        else:
            self._say(self._text.feed(token))
            self.stopped = self._stops.found
        return torch.tensor([self.stopped], device=input_ids.device)

    def finish(self) -> None:
        """Deliver what was held back."""
        self._say(self._text.rest())
        if not self._stops.found and (rest := self._stops.rest()):
            self._deliver(rest)
        self.stopped = self.stopped or self._stops.found

    def _say(self, piece: str) -> None:
        if piece and (shown := self._stops.feed(piece)):
            self._deliver(shown)


def settings_for(own: GenerationConfig, sampling: Sampling, new_tokens: int, ends: Sequence[int]) -> GenerationConfig:
    """Return the model's own settings with what a request wishes: one sequence, no beams, so many new tokens."""
    settings = copy.deepcopy(own)
    settings.update(
        max_new_tokens=new_tokens,
        max_length=None,
        min_length=None,
        num_beams=1,
        num_return_sequences=1,
        early_stopping=None,
        length_penalty=None,
        use_cache=True,
        return_dict_in_generate=False,
        eos_token_id=list(ends),
        pad_token_id=ends[0] if ends else 0,
    )
    if sampling.repetition_penalty is not None:
        settings.repetition_penalty = sampling.repetition_penalty
    wished = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    wished = {name: value for name, value in wished.items() if value is not None}
    if sampling.temperature == 0 or not (wished or own.do_sample):
        settings.update(do_sample=False, temperature=None, top_p=None, top_k=None, min_p=None)
        return settings
    settings.update(do_sample=True, **wished)
    if settings.top_k is None:
        settings.top_k = 0  # transformers would cut to its own 50 otherwise
    return settings


def ends_of(model: Any, tokeniser: Any) -> list[int]:
    """The tokens that end a text: those of the model's settings, else the tokeniser's."""
    settings = getattr(model, "generation_config", None)
    told = settings.eos_token_id if settings is not None else None
    told = tokeniser.eos_token_id if told is None else told
    return [] if told is None else [int(one) for one in (told if isinstance(told, list | tuple) else [told])]


def tokens_to_write(name: str, prompt: int, sampling: Sampling, context: int) -> int:
    """Return how many tokens may follow a prompt of so many; raises ContextLengthExceeded."""
    if prompt >= context:
        raise ContextLengthExceeded(name, prompt, context)
    new = sampling.max_tokens if sampling.max_tokens is not None else context - prompt
    if prompt + new > context:
        raise ContextLengthExceeded(name, prompt + new, context, "max_tokens")
    return new
