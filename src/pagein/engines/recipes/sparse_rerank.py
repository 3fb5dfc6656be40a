"""Reranking with sparse lexical encoders (SPLADE, arXiv:2107.05720): masked-language-model logits → word weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from pagein.engines.local.model import Floats, Ranking, Reranker
from pagein.engines.recipes.contract import OpenSession, Place, Recipe, Session, need_inputs
from pagein.engines.recipes.tokens import TextEncoder, batches
from pagein.errors import LoadFailed


@dataclass(frozen=True, slots=True)
class SparseRerank(Recipe):
    """Weight of a word = largest over the tokens of log(1 + relu(logit)); score = dot product of query and document."""

    tokenizer: str = "tokenizer.json"
    """File beside the model."""
    max_tokens: int = 512
    """What the model was trained for; longer texts are refused unless the request allows to cut documents."""
    batch_texts: int = 8
    """Most documents that are computed at once."""
    batch_tokens: int = 128
    """Most tokens, padding included, that are computed at once: each takes a row of the whole vocabulary (122 kB)."""

    def build(self, place: Place, open_session: OpenSession) -> Reranker:
        """Load tokenizer and model."""
        text = TextEncoder(place, self.tokenizer, self.max_tokens)
        return _SparseReranker(self, text, open_session(place.model_file()))


class _SparseReranker(Reranker):
    def __init__(self, recipe: SparseRerank, text: TextEncoder, session: Session) -> None:
        self._recipe, self._text, self._session = recipe, text, session
        self._inputs = need_inputs(session, {"input_ids", "attention_mask"}, "recipe 'sparse_rerank'")
        self.context = text.limit

    def rerank(self, query: str, documents: Sequence[str], max_tokens_per_document: int | None = None) -> Ranking:
        asked = self._text.encode(query)
        rows = [self._text.encode(text, max_tokens_per_document) for text in documents]
        weights = next(self._weights([asked]))[1][0]
        scores = [0.0] * len(rows)
        for places, matrix in self._weights(rows):
            for place, document in zip(places, matrix, strict=True):
                scores[place] = float(document @ weights)
        return Ranking(scores, len(asked) + sum(map(len, rows)))

    def _weights(self, rows: Sequence[list[int]]) -> Iterator[tuple[list[int], Floats]]:
        for batch in batches(rows, self._recipe.batch_texts, self._recipe.batch_tokens):
            logits = self._session.run(None, batch.feed(self._inputs))[0]
            if logits.ndim != 3:
                raise LoadFailed(f"recipe 'sparse_rerank' reads outputs of 3 dimensions, the model gives {logits.ndim}")
            yield batch.places, word_weights(logits, batch.lengths)


def word_weights(logits: Floats, lengths: Sequence[int]) -> Floats:
    """Return one weight per word and row (n × tokens × vocabulary → n × vocabulary), padding left out.

    The largest is taken first: log(1 + relu(x)) grows with x, so the result is the same and no second copy is needed.
    """
    largest = np.stack([row[:length].max(axis=0) for row, length in zip(logits, lengths, strict=True)])
    weights: Floats = np.log1p(np.maximum(largest, 0, dtype=np.float32))
    return weights
