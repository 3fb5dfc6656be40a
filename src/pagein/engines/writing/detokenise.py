"""Token numbers to text, one at a time: what is shown never changes afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence

UNFINISHED = "\ufffd"
"""What a decoder writes for bytes that are no whole character (yet)."""
_LONGEST_CHARACTER = 8
"""Tokens after which an unfinished character is taken to stay one: four bytes at most make a character."""


class Detokeniser:
    """Decodes a sequence as it grows.

    A token's text depends on its neighbours (spaces, characters of several tokens), so a window of the last tokens is
    decoded with and without the new ones, and the difference is shown; as in Hugging Face's text-generation-inference.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0
        """Tokens of the window whose text was shown."""

    def feed(self, token: int) -> str:
        """Return the text that a token adds, which may be none yet."""
        self._window.append(token)
        before, text = self._texts()
        waits = len(self._window) - self._shown < _LONGEST_CHARACTER
        if len(text) <= len(before) or (text.endswith(UNFINISHED) and waits):
            return ""
        self._window, self._shown = self._window[self._shown :], len(self._window) - self._shown
        return text[len(before) :]

    def rest(self) -> str:
        """Return what was held back, once no token comes any more."""
        before, text = self._texts()
        self._window, self._shown = [], 0
        return text[len(before) :]

    def _texts(self) -> tuple[str, str]:
        return self._decode(self._window[: self._shown]), self._decode(self._window)
