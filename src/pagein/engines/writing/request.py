"""One request for text: an ordinary ``generate`` of transformers, listened to token by token."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from pagein.engines.local.sampling import Sampling
from pagein.engines.local.stops import StopFinder
from pagein.engines.local.writer import Deliver, Ending, Prompt
from pagein.engines.writing.detokenise import Detokeniser


class Request:
    """Writes after a prompt and delivers the pieces; called in the compute thread."""

    def __init__(
        self,
        model: Any,
        prompt: Prompt,
        sampling: Sampling,
        settings: GenerationConfig,
        decode: Callable[[Sequence[int]], str],
        deliver: Deliver,
    ) -> None:
        self._model, self._prompt, self._sampling, self._settings = model, prompt, sampling, settings
        self._deliver = deliver
        self._ear = _Ear(settings.eos_token_id, sampling.stop, decode, deliver)

    def __call__(self) -> Ending:
        """Generate to the end."""
        seed = self._sampling.seed
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        tokens = torch.tensor([self._prompt.tokens], device=self._model.device)
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=self._settings,
            stopping_criteria=StoppingCriteriaList([self._ear]),
        )
        self._ear.finish()
        return Ending("stop" if self._ear.stopped else "length", len(self._prompt.tokens), self._ear.count)


class _Ear(StoppingCriteria):
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
        self.stopped = False
        """The model ended the text, or a stop string came."""
        self._ends = frozenset(ends)
        self._text, self._stops, self._deliver = Detokeniser(decode), StopFinder(stops), deliver

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        token = int(input_ids[0, -1])
        self.count += 1
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
