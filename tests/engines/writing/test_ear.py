"""The ear of a generation: what it passes on, and what it no longer hears."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.engines.writing.ear import Ear

pytestmark = pytest.mark.torch

END = 1


def hear(ear: Ear, *tokens: int) -> list[bool]:
    """What it says after each token: whether the text ends."""
    return [bool(ear(torch.tensor([[1, token]]), None)) for token in tokens]


def ear_of(said: list[str], *stops: str) -> Ear:
    """An ear for which a token is the letter of its number."""
    return Ear([END], stops, lambda tokens: "".join(map(chr, tokens)), said.append)


def test_what_comes_after_the_end_is_not_said():
    """Some ways of generating choose one more token before they look: it is none of the text, nor counted."""
    said: list[str] = []
    ear = ear_of(said)
    assert hear(ear, ord("a"), END, ord("b")) == [False, True, True]
    ear.finish()
    assert ("".join(said), ear.count, ear.stopped) == ("a", 2, True)


def test_a_stop_string_ends_it_too():
    """The text ends before it, however it came."""
    said: list[str] = []
    ear = ear_of(said, "bc")
    assert hear(ear, *map(ord, "abcd")) == [False, False, True, True]
    ear.finish()
    assert ("".join(said), ear.count) == ("a", 3)
