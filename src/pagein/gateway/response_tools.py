"""Tools and formats of the Responses API in the words of a chat."""

from __future__ import annotations

from typing import Any

from pagein.errors import BadRequest

_CHOICES = ("auto", "none", "required")
_TEXT: dict[str, Any] = {"format": {"type": "text"}}
_FUNCTION = ("name", "description", "parameters", "strict")


def read_tools(value: object) -> list[dict[str, Any]]:
    """Return the tools of a chat; raises BadRequest for what is no function."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRequest("`tools` must be a list", param="tools")
    return [_tool(item, f"tools[{at}]") for at, item in enumerate(value)]


def _tool(item: object, place: str) -> dict[str, Any]:
    kind = item.get("type") if isinstance(item, dict) else None
    if not isinstance(item, dict) or kind != "function":
        raise BadRequest(
            f"`{place}`: tools of type {str(kind)[:64]!r} are not served here, only functions of the client",
            param=place,
        )
    if not isinstance(item.get("name"), str) or not item["name"]:
        raise BadRequest(f"`{place}.name` must be the name of a function", param=f"{place}.name")
    return {"type": "function", "function": {key: item[key] for key in _FUNCTION if item.get(key) is not None}}


def read_tool_choice(value: object, tools: object) -> str | dict[str, Any] | None:
    """Return the choice of a chat; raises BadRequest."""
    if value is None or value in _CHOICES:
        return value if isinstance(value, str) else None
    name = value.get("name") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(name, str):
        raise BadRequest(
            f'`tool_choice` must be {", ".join(_CHOICES)}, or {{"type": "function", "name": …}}', param="tool_choice"
        )
    named = [item.get("name") for item in tools if isinstance(item, dict)] if isinstance(tools, list) else []
    if name not in named:
        raise BadRequest(f"`tool_choice` names {name[:64]!r}, which is not among `tools`", param="tool_choice")
    return {"type": "function", "function": {"name": name}}


def read_format(value: object) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return the ``response_format`` of a chat (None: text), and ``text`` as the response shows it."""
    if value is None:
        return None, _TEXT
    if not isinstance(value, dict):
        raise BadRequest("`text` must be an object", param="text")
    for name, inner in value.items():
        if name != "format" and not (name == "verbosity" and inner in (None, "medium")):
            raise BadRequest(f"`text.{str(name)[:64]}` is not served here", param=f"text.{str(name)[:64]}")
    wanted = value.get("format")
    if wanted is None:
        return None, _TEXT
    match wanted.get("type") if isinstance(wanted, dict) else None:
        case "text":
            return None, {"format": wanted}
        case "json_object":
            return {"type": "json_object"}, {"format": wanted}
        case "json_schema":
            schema = {key: item for key, item in wanted.items() if key != "type" and item is not None}
            return {"type": "json_schema", "json_schema": schema}, {"format": wanted}
    raise BadRequest("`text.format.type` must be text, json_object or json_schema", param="text.format")
