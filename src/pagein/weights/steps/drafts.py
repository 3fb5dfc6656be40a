"""Guesses at the next tokens: from what the text itself said before, or from a small model with the same tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from tokenizers import Tokenizer
from transformers.cache_utils import DynamicCache

from pagein.errors import ModelUnsuited
from pagein.weights.steps.caches import Cut, cache_name, why_uncut

GRAMS = (4, 3, 2)
"""Lengths of the ends of the text that are looked up, the longest first."""
CHUNK = 512
"""Tokens that a draft model computes at once."""


class Drafts(Protocol):
    """Where guesses come from, for one text."""

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Guess the next tokens of a text that only ever grows; at most ``count``, maybe none."""
        ...


class Lookup:
    """Guesses that the text goes on as it did the last time it said the same."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """For each gram where its latest occurrence ended that something follows."""
        self._known = 0

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return what followed the latest occurrence of the text's end; a repetition is thought to go on."""
        for end in range(max(self._known, 1), len(tokens)):
            for size in GRAMS:
                if end >= size:
                    self._after[tuple(tokens[end - size : end])] = end
        self._known = len(tokens)
        for size in GRAMS:
            found = self._after.get(tuple(tokens[-size:])) if len(tokens) > size else None
            if found is not None:
                period = len(tokens) - found
                return [tokens[found + step % period] for step in range(count)]
        return []


class DraftModel:
    """Guesses what a small model says, greedily. Its weights and its own KV cache are beside the plan's bytes."""

    def __init__(self, model: Any, vocabulary: int) -> None:
        """``vocabulary``: token ids that the large model knows."""
        obstacle = why_uncut(model)
        if obstacle is not None:
            raise ModelUnsuited(f"{draft_name(model)} cannot guess: {obstacle}")
        self._model, self._vocabulary = model, vocabulary
        self._cache_name = cache_name(model)
        self._cache = DynamicCache(config=model.config)
        self._seen: list[int] = []

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return the small model's greedy continuation."""
        same = next((at for at, (a, b) in enumerate(zip(self._seen, tokens, strict=False)) if a != b), len(self._seen))
        same = min(same, len(tokens) - 1)
        if same < len(self._seen):
            Cut(self._cache).show(same)
            del self._seen[same:]
        found: list[int] = []
        new = tokens[same:]
        with torch.inference_mode():
            while len(found) < count:
                found.append(self._next(new))
                new = found[-1:]
        return found

    def _next(self, new: list[int]) -> int:
        for start in range(0, len(new), CHUNK):
            part = new[start : start + CHUNK]
            ids = torch.tensor([part], device=self._model.device)
            logits = self._model(input_ids=ids, use_cache=True, **{str(self._cache_name): self._cache}).logits
            self._seen += part
        return int(logits[0, -1, : self._vocabulary].argmax())


def draft_name(model: Any) -> str:
    """Return how a draft model is called in messages."""
    return f"draft model {getattr(model, 'name_or_path', '') or type(model).__name__}"


def check_same_tokens(model: Any, folder: Path, draft: Any, tokenizer: Any = None, draft_tokenizer: Any = None) -> None:
    """Refuse a draft model whose token ids mean something else than the large model's.

    Compared are the tokenizers given, else those in the two models' folders, else only the sizes of the vocabularies
    (the same tokens may have tables padded to different sizes). Raises ModelUnsuited.
    """
    ours = _words(tokenizer, folder)
    theirs = _words(draft_tokenizer, Path(getattr(draft, "name_or_path", "") or "."))
    name, hint = draft_name(draft), "take a small model of the same family, or speculate='lookup', which needs none"
    if ours is not None and theirs is not None:
        odd = next((word for word, number in theirs.items() if ours.get(word) != number), None)
        odd = odd if odd is not None else next((word for word in ours if word not in theirs), None)
        if odd is not None:
            raise ModelUnsuited(
                f"{name} has another tokenizer ({len(theirs)} tokens) than {folder.name} ({len(ours)} tokens): "
                f"{odd!r} is number {theirs.get(odd)} there and {ours.get(odd)} here",
                hint=hint,
            )
        return
    sizes = vocabulary(draft), vocabulary(model)
    if sizes[0] != sizes[1]:
        raise ModelUnsuited(
            f"{name} has a vocabulary of {sizes[0]} tokens and {folder.name} one of {sizes[1]}",
            hint=f"{hint}; where only the padding differs, give tokenizer= and assistant_tokenizer=",
        )


def vocabulary(model: Any) -> int:
    """Return how many token ids a model knows."""
    return int(model.config.get_text_config(decoder=True).vocab_size)


def _words(tokenizer: Any, folder: Path) -> Mapping[str, int] | None:
    if tokenizer is not None:
        given: Mapping[str, int] = tokenizer.get_vocab()
        return given
    file = folder / "tokenizer.json"
    found: Mapping[str, int] | None = Tokenizer.from_file(str(file)).get_vocab() if file.is_file() else None
    return found
