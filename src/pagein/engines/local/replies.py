"""Answers of `/v1/chat/completions` and `/v1/completions` in OpenAI's shapes, whole or as events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping

from pagein.engines.local.writer import Ending

DONE = b"data: [DONE]\n\n"
_NOTHING: Mapping[str, object] = {}


class Shapes:
    """The shapes of one answer."""

    def __init__(self, model: str, *, chat: bool) -> None:
        self._chat = chat
        self._head: dict[str, object] = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, text: str, ending: Ending) -> dict[str, object]:
        """The answer in one piece."""
        content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": ending.reason}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": usage(ending), **timings(ending)}

    def first(self) -> bytes | None:
        """The event that opens a chat, with the role; None where there is none."""
        return self._event({"role": "assistant", "content": ""}, None) if self._chat else None

    def piece(self, text: str) -> bytes:
        """The event of a piece of text."""
        return self._event({"content": text} if self._chat else text, None)

    def last(self, ending: Ending) -> bytes:
        """The event that says why the text ended."""
        return self._event({} if self._chat else "", ending.reason, timings(ending))

    def counts(self, ending: Ending) -> bytes:
        """The event of ``include_usage``."""
        return _event({**self._head, "object": self._object, "choices": [], "usage": usage(ending)})

    def _event(self, content: dict[str, str] | str, reason: str | None, more: Mapping[str, object] = _NOTHING) -> bytes:
        name = "delta" if self._chat else "text"
        choice = {"index": 0, name: content, "logprobs": None, "finish_reason": reason}
        return _event({**self._head, "object": self._object, "choices": [choice], **more})

    @property
    def _object(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"


def usage(ending: Ending) -> dict[str, object]:
    """Counts of tokens."""
    reused = ending.reused
    details = {"prompt_tokens_details": {"cached_tokens": reused.cached}} if reused is not None else {}
    return {
        "prompt_tokens": ending.prompt_tokens,
        "completion_tokens": ending.completion_tokens,
        "total_tokens": ending.prompt_tokens + ending.completion_tokens,
        **details,
    }


def timings(ending: Ending) -> dict[str, object]:
    """What was computed and reused, in llama.cpp's words, with those of the prompt that were brought back."""
    reused = ending.reused
    if reused is None:
        return {}
    found: dict[str, object] = {
        "cache_n": reused.cached,
        "prompt_n": ending.prompt_tokens - reused.cached,
        "prompt_ms": round(reused.prompt_seconds * 1000, 3),
        "predicted_n": ending.completion_tokens,
        "predicted_ms": round(reused.write_seconds * 1000, 3),
        "restored_n": reused.restored,
    }
    return {"timings": found if reused.miss is None else {**found, "miss": reused.miss}}


def fault(error: dict[str, object]) -> bytes:
    """The event of an error in the middle of a stream."""
    return _event({"error": error})


def _event(body: dict[str, object]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
