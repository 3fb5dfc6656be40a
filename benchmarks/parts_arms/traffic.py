"""The mixed traffic that all ways answer: grammar 5, summarise 3, e-mail 2, the same requests in the same order."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of request."""

    share: int
    """Of ten requests."""
    prompt: int
    """Tokens."""
    answer: int
    """Tokens."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``number`` makes its prompt unlike those of all others."""

    task: str
    number: int
    prompt: list[int]
    answer: int


KINDS = {"grammar": Kind(5, 32, 12), "summarise": Kind(3, 256, 12), "email": Kind(2, 48, 20)}
FIRST = "grammar"
"""What is asked first."""
BLOCK = sum(kind.share for kind in KINDS.values())
"""Requests after which each kind has had its share."""
_SEED = 11
_TOKENS = 40_000
_BEGIN = 1000


def traffic(count: int) -> Iterator[Request]:
    """Yield so many requests, in shuffled blocks that each have the shares exactly."""
    shuffled = random.Random(_SEED)
    number = 0
    while number < count:
        block = [name for name, kind in KINDS.items() for _ in range(kind.share)]
        shuffled.shuffle(block)
        for name in block[: count - number]:
            yield request(name, number)
            number += 1


def warm_up() -> list[Request]:
    """One request of each kind, the first one first; not counted."""
    names = [FIRST, *(name for name in KINDS if name != FIRST)]
    return [request(name, -1 - place) for place, name in enumerate(names)]


def request(task: str, number: int) -> Request:
    """A request of a kind."""
    kind = KINDS[task]
    prompt = [_BEGIN + (97 * place + 7919 * number) % _TOKENS for place in range(kind.prompt)]
    return Request(task, number, prompt, kind.answer)
