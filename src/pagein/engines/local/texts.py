"""`/v1/embeddings` and `/v1/rerank`: from request to work, from result to answer."""

from __future__ import annotations

import base64
import math
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from pagein.engines.local.answer import Answer, Work, json_answer
from pagein.engines.local.bodies import read_json
from pagein.engines.local.fields import Fields, refuse
from pagein.engines.local.model import Embedder, Embeddings, Reranker

MAX_INPUTS = 2048
"""Texts of one request, as at OpenAI."""
_EMBEDDING_FIELDS = ("input", "encoding_format", "dimensions")
_RERANK_FIELDS = ("query", "documents", "top_n", "return_documents", "max_tokens_per_doc")


@dataclass(frozen=True, slots=True)
class TextsWanted:
    """A request for vectors."""

    texts: list[str]
    as_base64: bool
    dimensions: int | None


async def read_embeddings(request: web.Request) -> TextsWanted:
    """Read a request of `/v1/embeddings` (OpenAI's shape)."""
    fields = await read_json(request, _EMBEDDING_FIELDS)
    texts = read_inputs(fields)
    as_base64 = fields.choice("encoding_format", ("float", "base64")) == "base64"
    return TextsWanted(texts, as_base64, fields.whole("dimensions", 1, 1 << 20))


def embeddings_answer(name: str, wanted: TextsWanted, found: Embeddings) -> Answer:
    """Answer with vectors in OpenAI's shape; raises BadRequest where other dimensions were wanted."""
    width = found.vectors.shape[1]
    if wanted.dimensions not in (None, width):
        refuse(
            "dimensions",
            f"dimensions is {wanted.dimensions}; the vectors of {name!r} have {width} and cannot be shortened",
        )
    rows = [_encoded(row) if wanted.as_base64 else row.tolist() for row in found.vectors]
    data = [{"object": "embedding", "index": i, "embedding": row} for i, row in enumerate(rows)]
    usage = {"prompt_tokens": found.tokens, "total_tokens": found.tokens}
    body = {"object": "list", "data": data, "model": name, "usage": usage}
    return json_answer(body, f"{len(wanted.texts)} texts, {found.tokens} tokens")


async def embeddings(name: str, model: Embedder, request: web.Request) -> Work:
    """Read a request and return the work that answers it."""
    wanted = await read_embeddings(request)
    return lambda _: embeddings_answer(name, wanted, model.embed(wanted.texts))


def read_inputs(fields: Fields) -> list[str]:
    """Read the field ``input``: a text, or a list of them."""
    value = fields.need("input")
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts:
        refuse("input", "input must be a text or a list of texts that is not empty")
    if len(texts) > MAX_INPUTS:
        refuse("input", f"input has {len(texts)} texts, at most {MAX_INPUTS} are taken")
    for at, text in enumerate(texts):
        if isinstance(text, int | list):
            refuse("input", "input has token numbers; they belong to another model's vocabulary: send texts")
        _check_text(text, "input", f"input[{at}]")
    return texts


def _check_text(text: object, field: str, place: str) -> str:
    if not isinstance(text, str) or not text.strip():
        refuse(field, f"{place} must be a text that is not empty")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        refuse(field, f"{place} is no valid text at character {error.start}")
    return text


def _encoded(row: np.ndarray) -> str:
    return base64.b64encode(row.astype("<f4").tobytes()).decode()


async def rerank(name: str, model: Reranker, request: web.Request) -> Work:
    """Read a request of `/v1/rerank` (the shape that Jina and Cohere share)."""
    fields = await read_json(request, _RERANK_FIELDS)
    query = _check_text(fields.need("query"), "query", "query")
    documents = _documents(fields)
    top_n = fields.whole("top_n", 1, 1 << 31) or len(documents)
    with_documents = fields.flag("return_documents")
    longest = fields.whole("max_tokens_per_doc", 8, 1 << 20)

    def work(_: object) -> Answer:
        ranking = model.rerank(query, documents, longest)
        order = sorted(range(len(documents)), key=lambda i: (-_sortable(ranking.scores[i]), i))[:top_n]
        results: list[dict[str, object]] = [{"index": i, "relevance_score": ranking.scores[i]} for i in order]
        for result, i in zip(results, order, strict=True):
            if with_documents:
                result["document"] = {"text": documents[i]}
        usage = {"prompt_tokens": ranking.tokens, "total_tokens": ranking.tokens}
        body = {"object": "list", "model": name, "results": results, "usage": usage}
        return json_answer(body, f"{len(documents)} documents, {ranking.tokens} tokens")

    return work


def _documents(fields: Fields) -> list[str]:
    value = fields.need("documents")
    if not isinstance(value, list) or not value:
        refuse("documents", "documents must be a list of texts that is not empty")
    if len(value) > MAX_INPUTS:
        refuse("documents", f"documents has {len(value)} entries, at most {MAX_INPUTS} are taken")
    texts = [entry.get("text") if isinstance(entry, dict) else entry for entry in value]
    return [_check_text(text, "documents", f"documents[{at}]") for at, text in enumerate(texts)]


def _sortable(score: float) -> float:
    return -math.inf if math.isnan(score) else score
