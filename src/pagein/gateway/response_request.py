"""The body of ``POST /v1/responses``: what is asked, and the chat that answers it.

A field that is not served here is refused by its name, so that nobody waits for what never happens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagein.config.values import did_you_mean
from pagein.errors import BadRequest
from pagein.gateway.items import read_input, to_messages
from pagein.gateway.metadata import read_metadata
from pagein.gateway.openai import json_object, one_model
from pagein.gateway.ports import Desk
from pagein.gateway.response_tools import read_format, read_tool_choice, read_tools
from pagein.gateway.tasks import Asked, find_task, task_fields, user_of
from pagein.gateway.wishes import NO_WISHES, Wishes, read_wishes, wish_fields
from pagein.history import Entry
from pagein.protocol import Capability

_SERVED = (
    "model", "input", "instructions", "store", "previous_response_id", "conversation", "stream", "tools", "tool_choice",
    "parallel_tool_calls", "max_output_tokens", "temperature", "top_p", "metadata", "text", "reasoning",
)  # fmt: skip
_HINTS = ("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "stream_options")
"""Fields that change no answer here, and are let pass."""
_ONLY: Mapping[str, tuple[object, ...]] = {
    "background": (False,),
    "truncation": ("disabled",),
    "service_tier": ("auto", "default"),
    "include": ([], ["reasoning.encrypted_content"]),  # reasoning comes as it is, not encrypted
    "top_logprobs": (0,),
}
"""Fields that are served with these values only."""


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """One request, read and checked."""

    model: str
    """As it names it, with the task of a split model where that stands there."""
    asked: Asked
    user: str | None
    entries: tuple[Entry, ...]
    stream: bool
    store: bool | None
    """None: not said."""
    previous: str | None
    conversation: str | None
    instructions: str | None
    metadata: Mapping[str, str]
    settings: Mapping[str, Any]
    """Fields of the chat."""
    shown: Mapping[str, Any]
    """Fields of the response that repeat the request."""
    wishes: Wishes = NO_WISHES

    def chat_body(self, past: Sequence[Entry]) -> bytes:
        """Return the body of the chat that answers it."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": to_messages(self.instructions, (*past, *self.entries)),
            "stream": self.stream,
            **self.settings,
        }
        if self.stream:
            fields["stream_options"] = {"include_usage": True}
        return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


def read_response(body: bytes, desk: Desk) -> ResponseRequest:
    """Read a body; raises BadRequest that names the field, or as `find_task`."""
    fields = {name: value for name, value in json_object(body).items() if value is not None}
    named = one_model([fields["model"]] if "model" in fields else [])
    asked = find_task(desk, named, fields.get("task")).check(Capability.CHAT)
    wishes, own = read_wishes(fields), {*wish_fields(fields), *task_fields(asked, fields)}
    fields = {name: value for name, value in fields.items() if name not in own}
    _only_served(fields)
    conversation = _conversation(fields.get("conversation"))
    previous = _text(fields, "previous_response_id")
    if conversation is not None and previous is not None:
        raise BadRequest("give one of `previous_response_id` and `conversation`", param="previous_response_id")
    if "input" not in fields:
        raise BadRequest("the request needs `input`: a text or a list of items", param="input")
    entries = tuple(read_input(fields["input"]))
    if not entries and previous is None and conversation is None:
        raise BadRequest("`input` is empty, and nothing goes before it", param="input")
    settings, shown = _settings(fields)
    return ResponseRequest(
        named,
        asked,
        user_of(asked, fields),
        entries,
        bool(_flag(fields, "stream")),
        _flag(fields, "store"),
        previous,
        conversation,
        _text(fields, "instructions"),
        read_metadata(fields.get("metadata")),
        settings,
        shown,
        wishes,
    )


def _settings(fields: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of the chat, and those of the response that show them."""
    temperature, top_p = _number(fields, "temperature"), _number(fields, "top_p")
    longest, parallel = _count(fields, "max_output_tokens"), _flag(fields, "parallel_tool_calls")
    tools = read_tools(fields.get("tools"))
    choice = read_tool_choice(fields.get("tool_choice"), fields.get("tools"))
    response_format, text = read_format(fields.get("text"))
    effort = _effort(fields.get("reasoning"))
    settings = {
        "max_tokens": longest,
        "temperature": temperature,
        "top_p": top_p,
        "tools": tools or None,
        "tool_choice": choice if tools else None,
        "parallel_tool_calls": parallel if tools else None,
        "response_format": response_format,
        "reasoning_effort": effort,
    }
    shown = {
        "max_output_tokens": longest,
        "temperature": temperature,
        "top_p": top_p,
        "tools": fields.get("tools", []),
        "tool_choice": fields.get("tool_choice", "auto"),
        "parallel_tool_calls": True if parallel is None else parallel,
        "text": text,
        "reasoning": {"effort": effort, "summary": None},
    }
    return {name: value for name, value in settings.items() if value is not None}, shown


def _only_served(fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        if name in _SERVED or name in _HINTS:
            continue
        if name not in _ONLY:
            meant = did_you_mean(name[:64], [*_SERVED, *_HINTS, *_ONLY])
            raise BadRequest(f"the field {name[:64]!r} is not served here{meant}", param=name[:64])
        if value not in _ONLY[name]:
            served = " or ".join(json.dumps(item) for item in _ONLY[name])
            raise BadRequest(f"`{name}` is served here as {served} only", param=name)


def _conversation(value: object) -> str | None:
    identity = value.get("id") if isinstance(value, dict) else value
    if value is not None and not isinstance(identity, str):
        raise BadRequest("`conversation` must be an id, or an object with `id`", param="conversation")
    return identity if isinstance(identity, str) else None


def _effort(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, dict):
        raise BadRequest("`reasoning` must be an object", param="reasoning")
    for name, inner in value.items():
        if name != "effort" and inner is not None and (name, inner) != ("summary", "auto"):  # auto: where there is one
            raise BadRequest(f"`reasoning.{str(name)[:64]}` is not served here", param=f"reasoning.{str(name)[:64]}")
    return _text({"reasoning.effort": value["effort"]}, "reasoning.effort") if value.get("effort") else None


def _text(fields: Mapping[str, object], name: str) -> str | None:
    value = fields.get(name)
    if value is None or isinstance(value, str):
        return value
    raise BadRequest(f"`{name}` must be a text", param=name)


def _flag(fields: Mapping[str, object], name: str) -> bool | None:
    value = fields.get(name)
    if value is None or isinstance(value, bool):
        return value
    raise BadRequest(f"`{name}` must be true or false", param=name)


def _number(fields: Mapping[str, object], name: str) -> float | None:
    value = fields.get(name)
    if value is None or (isinstance(value, int | float) and not isinstance(value, bool)):
        return value
    raise BadRequest(f"`{name}` must be a number", param=name)


def _count(fields: Mapping[str, object], name: str) -> int | None:
    value = fields.get(name)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise BadRequest(f"`{name}` must be a whole number, at least 1", param=name)
