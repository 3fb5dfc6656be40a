"""What the results of a model say: labels of a text, labels of its tokens, one vector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagein.engines.local.labels import Labelled, Tag, Tagged
from pagein.engines.local.model import Floats
from pagein.engines.tasks.book import Served
from pagein.engines.writing.vectors import pool, unit
from pagein.errors import ModelUnsuited


def labelled(served: Served, found: Mapping[str, Any], result: Any) -> Labelled:
    """Return the labels of a text with their scores, as the model's configuration says that its logits are read."""
    config, logits = served.model.config, _logits(served, result)[0].float()
    kind = getattr(config, "problem_type", None)
    if kind == "multi_label_classification" or (kind != "regression" and logits.numel() == 1):
        logits = torch.sigmoid(logits)
    elif kind != "regression":
        logits = torch.softmax(logits, dim=-1)
    names = _names(config, logits.numel())
    return Labelled(dict(zip(names, logits.tolist(), strict=True)), int(found["input_ids"].numel()))


def tagged(served: Served, text: str, found: Mapping[str, Any], result: Any) -> Tagged:
    """Return the likeliest label of each token that stands for some of the text."""
    scores = torch.softmax(_logits(served, result)[0].float(), dim=-1)
    names = _names(served.model.config, scores.shape[-1])
    best = scores.max(dim=-1)
    ids, special = found["input_ids"][0].tolist(), found["special_tokens_mask"][0].tolist()
    places = found["offset_mapping"][0].tolist() if "offset_mapping" in found else [(None, None)] * len(ids)
    rows = zip(ids, special, places, best.indices.tolist(), best.values.tolist(), strict=True)
    tags = [
        Tag(served.tokens.decode([token]) if start is None else text[start:end], names[label], score, start, end)
        for token, filler, (start, end), label, score in rows
        if not filler
    ]
    return Tagged(tags, len(ids))


def vector(served: Served, result: Any) -> Floats:
    """Return one vector of length 1 of a model's last hidden states."""
    states = getattr(result, "last_hidden_state", None)
    if states is None:
        deep = getattr(result, "hidden_states", None)
        if not deep:
            raise ModelUnsuited(f"task {served.name!r}: {type(served.model).__name__} returns no hidden states")
        states = deep[-1]
    return unit(pool(states[0], served.pooling))


def _logits(served: Served, result: Any) -> torch.Tensor:
    logits = getattr(result, "logits", None)
    if logits is None:
        raise ModelUnsuited(f"task {served.name!r}: {type(served.model).__name__} returns no logits")
    found: torch.Tensor = logits.cpu()
    return found


def _names(config: Any, count: int) -> list[str]:
    told = getattr(config, "id2label", None) or {}
    return [str(told.get(index, f"LABEL_{index}")) for index in range(count)]
