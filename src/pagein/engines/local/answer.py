"""What a request becomes: work for the compute thread, then an answer with the line that the log gets about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished body."""

    body: bytes
    content_type: str
    note: str
    """What was done, for the log: ``3 texts, 41 tokens``."""


Work = Callable[[Callable[[], bool]], Answer]
"""Decoding, inference and formatting of one request; is given a question: was it abandoned meanwhile?"""


def json_answer(body: object, note: str) -> Answer:
    """Make a JSON answer."""
    return Answer(json.dumps(body, ensure_ascii=False).encode(), "application/json", note)
