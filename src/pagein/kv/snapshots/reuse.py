"""What an engine says that it reused and computed of a prompt: the only proof that a restore was used (rule 7)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

_SIGN = (b'"timings"', b'"cached_tokens"')
LONGEST_EVENT = 1024 * 1024
"""Bytes of one event that are looked at."""


@dataclass(frozen=True, slots=True)
class Counted:
    """The engine's own counters for one answer."""

    cached: int
    """Tokens of the prompt whose KV it had already."""
    computed: int
    """Tokens of the prompt that it computed."""
    prompt_seconds: float | None = None
    """What that took."""
    generated: int | None = None
    restored: int | None = None
    """Of the cached ones, those that it had to bring back from where they rested; None where it does not say."""
    miss: str | None = None
    """Why it reused nothing, as ``kind: reason``; None where it did, or does not say."""

    @property
    def prompt(self) -> int:
        """Tokens of the prompt."""
        return self.cached + self.computed

    def proves(self, restored: int) -> bool:
        """Whether a restore of so many tokens of this prompt was used in full: all but the one always computed."""
        return self.cached >= min(restored, self.prompt - 1)


def counted(answer: Mapping[str, object]) -> Counted | None:
    """Read the counters of one answer or event; None where it has none.

    llama.cpp gives ``timings`` (``cache_n``, ``prompt_n``) in answers and in the last event of a stream, our own engine
    with ``restored_n`` and ``miss`` beside; other servers give OpenAI's ``usage.prompt_tokens_details.cached_tokens``,
    in a stream only where the client asked for usage.
    """
    timings = answer.get("timings")
    if isinstance(timings, Mapping):
        cached, computed = _whole(timings.get("cache_n")), _whole(timings.get("prompt_n"))
        if cached is not None and computed is not None:
            spent = timings.get("prompt_ms")
            seconds = spent / 1000 if isinstance(spent, int | float) and not isinstance(spent, bool) else None
            restored, miss = _whole(timings.get("restored_n")), timings.get("miss")
            generated = _whole(timings.get("predicted_n"))
            return Counted(cached, computed, seconds, generated, restored, miss if isinstance(miss, str) else None)
    usage = answer.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, Mapping) else None
    if not isinstance(usage, Mapping) or not isinstance(details, Mapping):
        return None
    prompt, cached = _whole(usage.get("prompt_tokens")), _whole(details.get("cached_tokens"))
    if prompt is None or cached is None or cached > prompt:
        return None
    return Counted(cached, prompt - cached, generated=_whole(usage.get("completion_tokens")))


class CountedInStream:
    """Watches server-sent events pass and keeps the counters; costs a search per chunk, and parses one event or two."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._too_long = False
        self.value: Counted | None = None
        """The counters, once they have passed."""

    def feed(self, chunk: bytes) -> None:
        """Look at what passes; where it is cut does not matter."""
        *whole, rest = chunk.split(b"\n")
        for piece in whole:
            self._line += piece
            if not self._too_long:
                self._look()
            self._line.clear()
            self._too_long = False
        self._line += rest
        if len(self._line) > LONGEST_EVENT:
            self._line.clear()
            self._too_long = True

    def _look(self) -> None:
        if not self._line.startswith(b"data:") or not any(sign in self._line for sign in _SIGN):
            return
        try:
            answer = json.loads(self._line[5:])
        except (ValueError, RecursionError):
            return
        if isinstance(answer, dict) and (found := counted(answer)) is not None:
            self.value = found


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
