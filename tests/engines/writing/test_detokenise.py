"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from pagein.engines.writing.detokenise import Detokeniser


def decode(tokens: Sequence[int]) -> str:
    """A byte-level tokeniser without merges: every byte is a token."""
    return bytes(tokens).decode("utf-8", "replace")


def decode_words(tokens: Sequence[int]) -> str:
    """A tokeniser of words whose first token loses its space, as SentencePiece's does."""
    return "".join(f" {chr(97 + token)}" for token in tokens).lstrip()


@given(st.text(st.characters(codec="utf-8")))
def test_pieces_add_up_to_the_text(text: str) -> None:
    """Characters of several tokens come whole, and nothing is lost or said twice."""
    reader = Detokeniser(decode)
    pieces = [reader.feed(token) for token in text.encode()]
    assert "".join(pieces) + reader.rest() == text
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text


def test_spaces_between_tokens_stay() -> None:
    """A token's space is seen only beside its neighbour."""
    reader = Detokeniser(decode_words)
    assert [reader.feed(token) for token in (0, 1, 2)] == ["a", " b", " c"]


def test_an_unfinished_character_is_shown_in_the_end() -> None:
    """Bytes that never become a character come as the sign for that, once nothing follows."""
    reader = Detokeniser(decode)
    assert [reader.feed(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert reader.rest() == "\ufffd"
    assert reader.rest() == ""
