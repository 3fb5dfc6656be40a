"""`/v1/texts/classifications` and `/v1/texts/token-classifications`: what is asked, and the answers' shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aiohttp import web

from pagein.engines.local.answer import Answer, json_answer
from pagein.engines.local.bodies import read_json
from pagein.engines.local.texts import read_inputs

DIGITS = 6
"""Of a score in an answer."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """The labels of one text with their scores, in the order of the model."""

    scores: Mapping[str, float]
    tokens: int

    @property
    def best(self) -> str:
        """The likeliest."""
        return max(self.scores, key=self.scores.__getitem__)


@dataclass(frozen=True, slots=True)
class Tag:
    """The likeliest label of one token, and where the token lies in its text, in characters."""

    text: str
    label: str
    score: float
    start: int | None
    """None where the tokeniser does not tell."""
    end: int | None


@dataclass(frozen=True, slots=True)
class Tagged:
    """The tokens of one text but for those that only begin, end or fill it."""

    tags: Sequence[Tag]
    tokens: int


async def read_texts(request: web.Request) -> list[str]:
    """Read a request for labels; raises BadRequest that names the field."""
    return read_inputs(await read_json(request, ("input",)))


def labels_answer(name: str, found: Sequence[Labelled]) -> Answer:
    """Answer with the likeliest label of each text, and the score of every label."""
    data = [
        {
            "index": index,
            "label": one.best,
            "score": round(one.scores[one.best], DIGITS),
            "scores": {label: round(score, DIGITS) for label, score in one.scores.items()},
        }
        for index, one in enumerate(found)
    ]
    return _answer(name, data, sum(one.tokens for one in found))


def tags_answer(name: str, found: Sequence[Tagged]) -> Answer:
    """Answer with the likeliest label of each token of each text."""
    data = [{"index": index, "tokens": [_tag(tag) for tag in one.tags]} for index, one in enumerate(found)]
    return _answer(name, data, sum(one.tokens for one in found))


def _tag(tag: Tag) -> dict[str, object]:
    return {
        "text": tag.text,
        "label": tag.label,
        "score": round(tag.score, DIGITS),
        "start": tag.start,
        "end": tag.end,
    }


def _answer(name: str, data: Sequence[Mapping[str, object]], tokens: int) -> Answer:
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"object": "list", "model": name, "data": data, "usage": usage}
    return json_answer(body, f"{len(data)} texts, {tokens} tokens")
