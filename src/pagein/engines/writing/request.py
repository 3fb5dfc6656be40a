"""One request for text: an ordinary ``generate`` of transformers, listened to token by token."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from pagein.engines.local.sampling import Sampling
from pagein.engines.local.stops import StopFinder
from pagein.engines.local.writer import Deliver, Ending, Prompt, Reused, Whose
from pagein.engines.writing.conversations import Conversations
from pagein.engines.writing.detokenise import Detokeniser
from pagein.engines.writing.turns import Turn
from pagein.kv.cache.answers import Source


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
        conversations: Conversations | None,
        whose: Whose,
    ) -> None:
        """Without ``conversations`` the model keeps state of its own kind, and nothing is reused."""
        self._model, self._prompt, self._sampling, self._settings = model, prompt, sampling, settings
        self._deliver, self._conversations, self._whose = deliver, conversations, whose
        self._ear = _Ear(settings.eos_token_id, sampling.stop, decode, deliver)

    def __call__(self) -> Ending:
        """Generate to the end."""
        seed = self._sampling.seed
        torch.manual_seed(secrets.randbits(63) if seed is None else seed)
        ids = torch.tensor([self._prompt.tokens], device=self._model.device)
        reused = None
        if self._conversations is None:
            self._generate(ids)
        else:
            reused = self._continue(ids, self._conversations)
        self._ear.finish()
        return Ending("stop" if self._ear.stopped else "length", len(self._prompt.tokens), self._ear.count, reused)

    def _continue(self, ids: torch.Tensor, conversations: Conversations) -> Reused:
        """Generate with the KV of what is known of the prompt, and keep it with what comes."""
        chunk = self._settings.prefill_chunk_size
        turn = conversations.begin(self._whose, self._prompt.tokens, self._settings.max_new_tokens)
        try:
            begun = monotonic()
            if chunk is not None:
                conversations.read_ahead(turn, ids, chunk)
            # As an argument: None among the settings would be filled in with the model's own. The oldest transformers
            # would read the whole prompt again in chunks, on top of what is known of it.
            found = self._generate(ids, prefill_chunk_size=None, **conversations.cache_for(turn))
            done = monotonic()
            conversations.end(turn, found[0].tolist())
        except BaseException:
            conversations.abandon(turn)
            raise
        first = self._ear.first_at or done
        found_of = turn.reuse.tokens if turn.reuse is not None else 0
        conversations.pool.prefilled(len(self._prompt.tokens) - found_of, first - begun)
        return reused_of(turn, self._whose, first - begun, done - first)

    def _generate(self, ids: torch.Tensor, **more: Any) -> torch.Tensor:
        found: torch.Tensor = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=self._settings,
            stopping_criteria=StoppingCriteriaList([self._ear]),
            **more,
        )
        return found


_KINDS = {"not worth it": "slower", "with other": "settings", "is lost": "damaged"}
"""Words of the pool's reasons, and the kinds of misses that they stand for."""
_UNWANTED = "unwanted: it says `cache_prompt: false`"
_ENCODER = "encoder: what its decoder keeps depends on the encoder's input"


def reused_of(turn: Turn, whose: Whose, prompt_seconds: float, write_seconds: float) -> Reused:
    """Say what a turn found of its prompt."""
    found = turn.reuse
    if found is None or not whose.reuse:
        return Reused(0, 0, _UNWANTED if found is not None else _ENCODER, prompt_seconds, write_seconds)
    restored = found.tokens if found.source in (Source.HOST, Source.DISK) else 0
    kind = next((kind for sign, kind in _KINDS.items() if sign in found.reason), "tokens")
    miss = None if found.tokens else f"{kind}: {found.reason}"
    return Reused(found.tokens, restored, miss, prompt_seconds, write_seconds)


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
        self.first_at: float | None = None
        """Monotonic seconds when the first one was there."""
        self.stopped = False
        """The model ended the text, or a stop string came."""
        self._ends = frozenset(ends)
        self._text, self._stops, self._deliver = Detokeniser(decode), StopFinder(stops), deliver

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
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
