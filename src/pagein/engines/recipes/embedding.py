"""Sentence embeddings of BERT-like encoders: all-MiniLM, E5, BGE, GTE and their kin."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pagein.engines.local.model import Embedder, Embeddings, Floats
from pagein.engines.recipes.contract import OpenSession, Place, Recipe, Session, need_inputs
from pagein.engines.recipes.tokens import Batch, TextEncoder, batches
from pagein.errors import LoadFailed

_SMALLEST_NORM = 1e-12


@dataclass(frozen=True, slots=True)
class Embedding(Recipe):
    """Tokens → vectors per token → one vector per text."""

    tokenizer: str = "tokenizer.json"
    """File beside the model."""
    pooling: Literal["mean", "cls"] = "mean"
    """Mean of the token vectors, or the first token's; a model that gives one vector per text needs neither."""
    normalise: bool = True
    """Scale vectors to length 1, so that their dot product is their cosine."""
    max_tokens: int = 512
    """What the model was trained for; longer texts are refused."""
    batch_texts: int = 32
    """Most texts that are computed at once."""
    batch_tokens: int = 512
    """Most tokens, padding included, that are computed at once; attention takes memory with their square."""

    def build(self, place: Place, open_session: OpenSession) -> Embedder:
        """Load tokenizer and model."""
        return _Encoder(self, TextEncoder(place, self.tokenizer, self.max_tokens), open_session(place.model_file()))


class _Encoder(Embedder):
    def __init__(self, recipe: Embedding, text: TextEncoder, session: Session) -> None:
        self._recipe, self._text, self._session = recipe, text, session
        self._inputs = need_inputs(session, {"input_ids"}, "recipe 'embedding'")
        self.context = text.limit

    def embed(self, texts: Sequence[str]) -> Embeddings:
        rows = [self._text.encode(text) for text in texts]
        parts: list[Floats | None] = [None] * len(rows)
        for batch in batches(rows, self._recipe.batch_texts, self._recipe.batch_tokens):
            output = self._session.run(None, batch.feed(self._inputs))[0]
            for place, vector in zip(batch.places, self._pooled(output, batch), strict=True):
                parts[place] = vector
        return Embeddings(np.stack([part for part in parts if part is not None]), sum(map(len, rows)))

    def _pooled(self, output: Floats, batch: Batch) -> Floats:
        if output.ndim == 2:
            vectors = output
        elif output.ndim != 3:
            raise LoadFailed(f"recipe 'embedding' reads outputs of 2 or 3 dimensions, the model gives {output.ndim}")
        elif self._recipe.pooling == "cls":
            vectors = output[:, 0]
        else:
            vectors = mean_pooled(output, batch.lengths)
        return normalised(vectors) if self._recipe.normalise else vectors.astype(np.float32)


def mean_pooled(output: Floats, lengths: Sequence[int]) -> Floats:
    """Return the mean over the real tokens of each row (n × tokens × width → n × width)."""
    return np.stack([row[:length].mean(axis=0, dtype=np.float32) for row, length in zip(output, lengths, strict=True)])


def normalised(vectors: Floats) -> Floats:
    """Return the rows scaled to length 1; a zero row stays zero."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    scaled: Floats = (vectors / np.maximum(norms, _SMALLEST_NORM)).astype(np.float32)
    return scaled
