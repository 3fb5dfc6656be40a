"""Texts to vectors: the last hidden states of a model's body, pooled and brought to length 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch

from pagein.engines.local.model import Floats
from pagein.engines.writing.conversations import Conversations
from pagein.weights.steps.caches import cache_name, goes_in_chunks

Pooling = Literal["mean", "cls", "last"]


class Body:
    """The part of a model that makes hidden states."""

    def __init__(self, model: Any, pooling: Pooling, chunk: int, conversations: Conversations | None = None) -> None:
        """``chunk`` tokens at a time are computed where the model looks back only, over blocks of ``conversations``."""
        self._model = model
        encoder = model.config.is_encoder_decoder
        self._body = model.get_encoder() if encoder else model.base_model
        self._pooling, self._chunk, self._conversations = pooling, chunk, conversations
        looks_back = model.can_generate() and goes_in_chunks(model)
        self._cache = cache_name(self._body) if looks_back else None

    def vector(self, tokens: list[int]) -> Floats:
        """Return one vector (width, fp32, length 1) of a text's tokens."""
        ids = torch.tensor([tokens], device=self._model.device)  # the body's own may be meta
        if self._cache is None:
            pooled = pool(self._body(input_ids=ids).last_hidden_state[0], self._pooling)
        elif self._conversations is None:
            pooled = self._in_chunks(ids, self._cache, None)
        else:
            with self._conversations.scratch(tokens) as cache:
                pooled = self._in_chunks(ids, self._cache, cache)
        return unit(pooled)

    def _in_chunks(self, ids: torch.Tensor, cache: str, blocks: Any) -> torch.Tensor:
        """The same with the KV cache of what came before, so that activations stay those of a chunk."""
        total, ends = torch.zeros(()), list[torch.Tensor]()
        past: dict[str, Any] = {} if blocks is None else {cache: blocks}
        for part in ids.split(self._chunk, dim=1):
            if self._conversations is not None:
                self._conversations.turns.before_pass(blocks, part.shape[1])
            answer = self._body(input_ids=part, use_cache=True, **past)
            states, past = answer.last_hidden_state[0].float(), past or {cache: answer[cache]}
            total = total + states.sum(dim=0)
            ends += [states[0], states[-1]]
        return {"mean": total / ids.shape[1], "cls": ends[0], "last": ends[-1]}[self._pooling]


def pool(states: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """Return one vector of a text's states: (tokens × width) → (width) in fp32."""
    if pooling == "mean":
        return states.float().mean(dim=0)
    return states[0 if pooling == "cls" else -1].float()


def unit(pooled: torch.Tensor) -> Floats:
    """Return a vector of length 1."""
    vector: Floats = pooled.cpu().numpy().astype(np.float32)
    return vector / max(float(np.linalg.norm(vector)), 1e-12)


def pooling_of(folder: Path) -> Pooling:
    """Return the pooling that a folder of sentence-transformers names, else the mean."""
    try:
        told = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return "mean"
    if not isinstance(told, dict):
        return "mean"
    kinds: tuple[Pooling, ...] = get_args(Pooling)
    names = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}
    return next((kind for kind in kinds if told.get(names[kind]) is True), "mean")
