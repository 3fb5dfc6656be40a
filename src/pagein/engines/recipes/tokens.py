"""Text to token numbers for the recipes that read text: counted, bounded, and batched without needless padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from pagein.engines.recipes.contract import Place
from pagein.errors import ContextLengthExceeded, LoadFailed

Ints = NDArray[np.int64]
_CHARACTERS_PER_TOKEN = 100
"""A text of more characters than this per allowed token is refused before it is tokenised, which costs memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Some texts as a padded matrix (n × longest)."""

    places: list[int]
    """Where each row belongs in the order of the texts."""
    lengths: list[int]
    """Tokens of each row; what follows them is padding."""
    ids: Ints
    mask: Ints

    def feed(self, names: set[str]) -> dict[str, Ints]:
        """The inputs of a BERT-like model, as far as it has them."""
        whole = {"input_ids": self.ids, "attention_mask": self.mask, "token_type_ids": np.zeros_like(self.ids)}
        return {name: value for name, value in whole.items() if name in names}


class TextEncoder:
    """A tokenizer with the limits of one model."""

    def __init__(self, place: Place, tokenizer: str, max_tokens: int) -> None:
        """Load the tokenizer file beside a model; the configured context may lower the limit of tokens only."""
        if place.context is not None and place.context > max_tokens:
            raise LoadFailed(
                f"context of {place.name!r} is {place.context}, its recipe allows {max_tokens} tokens",
                hint="lower context, or raise options.max_tokens if the model was trained for more",
            )
        self.limit = min(max_tokens, place.context or max_tokens)
        self._name = place.name
        file = place.beside(tokenizer)
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise LoadFailed(f"{file} is not a usable tokenizer: {error}") from error
        self._tokenizer.no_padding()  # some files pad every text to a fixed length
        self._tokenizer.no_truncation()  # cutting a text off is the caller's choice

    def encode(self, text: str, cut_at: int | None = None) -> list[int]:
        """Return the token numbers, special tokens included; cut off only where asked.

        Raises ContextLengthExceeded.
        """
        limit = self.limit if cut_at is None else min(cut_at, self.limit)
        if len(text) > limit * _CHARACTERS_PER_TOKEN:
            if cut_at is None:
                raise ContextLengthExceeded(self._name, None, self.limit)
            text = text[: limit * _CHARACTERS_PER_TOKEN]
        ids: list[int] = self._tokenizer.encode(text).ids
        if len(ids) <= limit:
            return ids
        if cut_at is None:
            raise ContextLengthExceeded(self._name, len(ids), self.limit)
        return [*ids[: limit - 1], ids[-1]]  # the last one is the end mark


def batches(rows: Sequence[list[int]], max_texts: int, max_tokens: int) -> Iterator[Batch]:
    """Yield all rows, texts of like length together, within the limits of texts and of padded tokens per batch.

    A single row longer than ``max_tokens`` makes a batch of its own.
    """
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    chosen: list[int] = []
    for i in order:
        if chosen and (len(chosen) == max_texts or (len(chosen) + 1) * len(rows[i]) > max_tokens):
            yield _padded(rows, chosen)
            chosen = []
        chosen.append(i)
    if chosen:
        yield _padded(rows, chosen)


def _padded(rows: Sequence[list[int]], places: list[int]) -> Batch:
    lengths = [len(rows[i]) for i in places]
    ids = np.zeros((len(places), max(lengths)), np.int64)
    mask = np.zeros_like(ids)
    for row, i in enumerate(places):
        ids[row, : lengths[row]] = rows[i]
        mask[row, : lengths[row]] = 1
    return Batch(places, lengths, ids, mask)
