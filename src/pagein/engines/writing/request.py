"""One request for text: an ordinary ``generate`` of transformers, listened to token by token."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteriaList

from pagein.engines.local.sampling import Sampling
from pagein.engines.local.writer import Deliver, Ending, Prompt, Reused, Whose
from pagein.engines.writing.conversations import Conversations
from pagein.engines.writing.ear import Ear
from pagein.engines.writing.turns import Turn
from pagein.kv.tiers.answers import Source, Why


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
        self._ear = Ear(settings.eos_token_id, sampling.stop, decode, deliver)

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


_UNWANTED = "unwanted: it says `cache_prompt: false`"
_ENCODER = "encoder: what its decoder keeps depends on the encoder's input"


def reused_of(turn: Turn, whose: Whose, prompt_seconds: float, write_seconds: float) -> Reused:
    """Say what a turn found of its prompt."""
    found = turn.reuse
    if found is None or not whose.reuse:
        return Reused(0, 0, _UNWANTED if found is not None else _ENCODER, prompt_seconds, write_seconds)
    restored = found.tokens if found.source in (Source.HOST, Source.DISK) else 0
    miss = None if found.tokens else f"{found.kind or Why.TOKENS}: {found.reason}"
    return Reused(found.tokens, restored, miss, prompt_seconds, write_seconds)
