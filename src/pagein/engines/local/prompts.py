"""Reads requests of `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from pagein.engines.local import sampling as how
from pagein.engines.local.bodies import read_json
from pagein.engines.local.fields import Fields, refuse
from pagein.engines.local.sampling import Sampling, read_sampling
from pagein.engines.local.writer import Message

_CHAT_FIELDS = ("messages", "chat_template_kwargs", *how.FIELDS)
_COMPLETION_FIELDS = ("prompt", *how.FIELDS)
_ROLES = ("system", "developer", "user", "assistant")
_MESSAGE_FIELDS = ("role", "content", "name", "refusal", "tool_calls", "function_call", "annotations", "audio")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for text."""

    sampling: Sampling
    stream: bool
    with_usage: bool
    """A stream ends with the counts of tokens."""
    messages: tuple[Message, ...] | None = None
    """None for a bare prompt."""
    template_options: dict[str, object] = field(default_factory=dict)
    prompt: str = ""
    reuse: bool = True
    """``cache_prompt``, as llama.cpp calls it."""


async def read_chat(request: web.Request) -> Wanted:
    """Read a chat; raises BadRequest that names the field."""
    fields = await read_json(request, _CHAT_FIELDS)
    messages = _messages(fields.need("messages"))
    return Wanted(
        read_sampling(fields),
        fields.flag("stream"),
        _with_usage(fields),
        messages=messages,
        template_options=_template_options(fields.get("chat_template_kwargs")),
        reuse=_reuse(fields),
    )


async def read_completion(request: web.Request) -> Wanted:
    """Read a prompt to continue; raises BadRequest that names the field."""
    fields = await read_json(request, _COMPLETION_FIELDS)
    prompt = fields.need("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if isinstance(prompt, int) or (isinstance(prompt, list) and prompt and isinstance(prompt[0], int | list)):
        refuse("prompt", "prompt has token numbers; they belong to another model's vocabulary: send a text")
    if not isinstance(prompt, str) or not prompt:
        refuse("prompt", "prompt must be one text that is not empty")
    whole = _valid(prompt, "prompt")
    return Wanted(read_sampling(fields), fields.flag("stream"), _with_usage(fields), prompt=whole, reuse=_reuse(fields))


def _reuse(fields: Fields) -> bool:
    return fields.get("cache_prompt") is None or fields.flag("cache_prompt")


def _with_usage(fields: Fields) -> bool:
    options = fields.get("stream_options")
    if options is None:
        return False
    if not isinstance(options, dict):
        refuse("stream_options", "stream_options must be an object")
    return Fields(options, ("include_usage", "include_obfuscation")).flag("include_usage")


def _template_options(value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(
        isinstance(one, str | int | float | bool | None) for one in value.values()
    ):
        refuse("chat_template_kwargs", "chat_template_kwargs must be an object of texts, numbers and truth values")
    return value


def _messages(value: object) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        refuse("messages", "messages must be a list that is not empty")
    return tuple(_message(one, at) for at, one in enumerate(value))


def _message(value: object, at: int) -> Message:
    place = f"messages[{at}]"
    if not isinstance(value, dict):
        refuse("messages", f"{place} must be an object with role and content")
    for name in value:
        if name not in _MESSAGE_FIELDS:
            refuse("messages", f"{place}.{str(name)[:80]} is not a field of a message")
    role = value.get("role")
    if role not in _ROLES:
        refuse("messages", f"{place}.role is {str(role)[:80]!r}; this engine knows {', '.join(_ROLES)}")
    if value.get("tool_calls") or value.get("function_call"):
        refuse("messages", f"{place} calls a tool, which this engine does not do")
    return {"role": "system" if role == "developer" else str(role), "content": _content(value.get("content"), place)}


def _content(value: object, place: str) -> str:
    if value is None:
        return ""
    if isinstance(value, str):
        return _valid(value, "messages")
    if not isinstance(value, list):
        refuse("messages", f"{place}.content must be a text or a list of parts")
    return "".join(_part(part, f"{place}.content[{at}]") for at, part in enumerate(value))


def _part(value: object, place: str) -> str:
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind != "text" or not isinstance(value.get("text"), str):
        refuse("messages", f"{place} is {str(kind)[:40]!r}; this engine takes parts of type text")
    return _valid(value["text"], "messages")


def _valid(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        refuse(name, f"{name} has no valid text at character {error.start}")
    return text
