"""The request that ``pagein run`` sends for each capability."""

from __future__ import annotations

from dataclasses import dataclass, field

import aiohttp

from pagein.cli.inputs import Input
from pagein.errors import BadUsage
from pagein.protocol import Capability


@dataclass(frozen=True, slots=True)
class Extra:
    """What the options add to a request."""

    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    documents: list[str] = field(default_factory=list)


def question(capability: Capability, model: str, given: Input, extra: Extra) -> dict[str, object] | aiohttp.FormData:
    """Return the body of the request: JSON for text, a form for files. Raises BadUsage."""
    match capability:
        case Capability.CHAT:
            system = [{"role": "system", "content": extra.system}] if extra.system is not None else []
            messages = [*system, {"role": "user", "content": given.text}]
            return {"model": model, "messages": messages, **_sampling(extra)}
        case Capability.COMPLETION:
            return {"model": model, "prompt": given.text, **_sampling(extra)}
        case Capability.EMBEDDING | Capability.TEXT_CLASSIFICATION | Capability.TOKEN_CLASSIFICATION:
            return {"model": model, "input": given.text}
        case Capability.RERANK:
            if not extra.documents:
                raise BadUsage("a reranker needs documents to rank", hint="add them: --document TEXT --document TEXT")
            return {"model": model, "query": given.text, "documents": extra.documents}
        case Capability.TRANSCRIPTION | Capability.CLASSIFICATION | Capability.SALIENCY:
            return _upload(model, given)


def _sampling(extra: Extra) -> dict[str, object]:
    chosen = {"max_tokens": extra.max_tokens, "temperature": extra.temperature}
    return {name: value for name, value in chosen.items() if value is not None}


def _upload(model: str, given: Input) -> aiohttp.FormData:
    form = aiohttp.FormData()
    form.add_field("model", model)  # first, so that the daemon finds it without reading the file
    form.add_field("file", given.data, filename=given.name, content_type=given.mime)
    return form
