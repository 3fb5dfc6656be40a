"""Items of the Responses API: reading those of a request, and turning them into the messages of a chat.

What is kept is the item with its content parts as they came; a text in place of a list of parts becomes one part, as
OpenAI returns it. The same items always become the same messages, so that a prompt begins with the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pagein.errors import BadRequest
from pagein.history import Entry, new_id

_ROLES = ("user", "assistant", "system", "developer")
_PREFIX = {"message": "msg", "function_call": "fc", "function_call_output": "fco", "reasoning": "rs"}
_LONGEST_WORD = 64


def read_input(value: object, name: str = "input") -> list[Entry]:
    """Read the input of a request, a text or a list of items; raises BadRequest that names the place."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest(f"`{name}` must be a text or a list of items", param=name)
    return [_read_item(item, f"{name}[{at}]") for at, item in enumerate(value)]


def _read_item(value: object, place: str) -> Entry:
    if not isinstance(value, dict):
        raise BadRequest(f"`{place}` must be an object", param=place)
    kind = value.get("type", "message")
    if not isinstance(kind, str) or kind not in _PREFIX:
        known = ", ".join(_PREFIX)
        raise BadRequest(
            f"`{place}`: items of type {str(kind)[:_LONGEST_WORD]!r} are not served here: {known}", param=place
        )
    identity = new_id(_PREFIX[kind])
    item = {**value, "type": kind, "id": identity}
    match kind:
        case "message":
            _check(value.get("role") in _ROLES, f"{place}.role", f"one of {', '.join(_ROLES)}")
            item["content"] = _read_content(value.get("content"), value["role"], f"{place}.content")
            item["status"] = "completed"
        case "function_call":
            for key in ("call_id", "name", "arguments"):
                _check(isinstance(value.get(key), str), f"{place}.{key}", "a text")
            item["status"] = "completed"
        case "function_call_output":
            _check(isinstance(value.get("call_id"), str), f"{place}.call_id", "a text")
            _read_output(value.get("output"), f"{place}.output")
            item["status"] = "completed"
        case "reasoning":
            _check(isinstance(value.get("summary", []), list), f"{place}.summary", "a list")
            item.setdefault("summary", [])
    return Entry(identity, item)


def _read_content(value: object, role: str, place: str) -> list[dict[str, Any]]:
    if isinstance(value, str):
        answer = {"type": "output_text", "text": value, "annotations": []}
        return [answer if role == "assistant" else {"type": "input_text", "text": value}]
    _check(isinstance(value, list), place, "a text or a list of parts")
    assert isinstance(value, list)
    for at, part in enumerate(value):
        _check(isinstance(part, dict), f"{place}[{at}]", "an object")
        _part(part, f"{place}[{at}]")
    return value


def _read_output(value: object, place: str) -> None:
    if isinstance(value, str):
        return
    _check(isinstance(value, list), place, "a text or a list of texts")
    assert isinstance(value, list)
    for at, part in enumerate(value):
        text = isinstance(part, dict) and part.get("type") in ("input_text", "output_text", "text")
        _check(text and isinstance(part.get("text"), str), f"{place}[{at}]", "a text: nothing else is served here")


def _part(part: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return a part of a message as a chat has it; raises BadRequest."""
    kind = part.get("type")
    match kind:
        case "input_text" | "output_text" | "text":
            _check(isinstance(part.get("text"), str), f"{place}.text", "a text")
            return {"type": "text", "text": part["text"]}
        case "refusal":
            _check(isinstance(part.get("refusal"), str), f"{place}.refusal", "a text")
            return {"type": "text", "text": part["refusal"]}
        case "input_image":
            url = part.get("image_url")
            _check(isinstance(url, str), f"{place}.image_url", "an address or a data: URL; files are not kept here")
            detail = {"detail": part["detail"]} if isinstance(part.get("detail"), str) else {}
            return {"type": "image_url", "image_url": {"url": url, **detail}}
        case "input_audio":
            _check(isinstance(part.get("input_audio"), dict), f"{place}.input_audio", "an object")
            return {"type": "input_audio", "input_audio": part["input_audio"]}
    raise BadRequest(f"`{place}`: parts of type {str(kind)[:_LONGEST_WORD]!r} are not served here", param=place)


def _check(holds: bool, place: str, what: str) -> None:
    if not holds:
        raise BadRequest(f"`{place}` must be {what}", param=place)


def to_messages(instructions: str | None, entries: Iterable[Entry]) -> list[dict[str, Any]]:
    """Return the messages of a chat: instructions first, tool calls beside the message that they came with."""
    messages: list[dict[str, Any]] = []
    if instructions is not None:
        messages.append({"role": "system", "content": instructions})
    for entry in entries:
        _add(messages, entry.body)
    return messages


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any]) -> None:
    match item["type"]:
        case "message":
            role = "system" if item["role"] == "developer" else item["role"]
            content = _content(item["content"])
            leading = len(messages) == 1 and messages[0]["role"] == role == "system"
            if leading and isinstance(content, str):  # many templates take one system message only
                messages[0] = {"role": "system", "content": f"{messages[0]['content']}\n\n{content}"}
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            call = {
                "id": item["call_id"],
                "type": "function",
                "function": {"name": item["name"], "arguments": item["arguments"]},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = item["output"]
            text = output if isinstance(output, str) else "".join(part["text"] for part in output)
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": text})


def _content(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return one text as a text, which every template takes."""
    said = [_part(part, "content") for part in parts]
    if not said:
        return ""
    return said[0]["text"] if len(said) == 1 and said[0]["type"] == "text" else said
