"""One setting in words: its type, its default and its meaning, for people; the same on every machine."""

from __future__ import annotations

import json
import math
import types
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MinLen
from pydantic.fields import FieldInfo

from pagein.config.schema import ALIASES, Model, Section
from pagein.config.source import read_value
from pagein.config.values import Kind

_PLAIN = {str: "text", int: "whole number", bool: "`true` or `false`"}


def meaning(name: str, field: FieldInfo, section: type[Section]) -> str:
    """Return the description, with the other names of the key."""
    others = [alias for alias, key in ALIASES.items() if key == name and section is Model]
    also = f" Also written `{others[0]}`." if others else ""
    return f"{field.description}{also}"


def type_words(field: FieldInfo) -> str:
    """Return what may stand there: ``duration, above 0``."""
    kind = next((item.name for item in field.metadata if isinstance(item, Kind)), None)
    return ", ".join([kind or _words(field.annotation), *_bounds(field)])


def _words(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        kind = next((item.name for item in arguments[1:] if isinstance(item, Kind)), None)
        return kind or _words(arguments[0])
    if origin in (Union, types.UnionType):
        return _words(next(item for item in arguments if item is not type(None)))
    if origin is list:
        return f"list of {_words(arguments[0])}s"
    return _PLAIN[annotation]


def _bounds(field: FieldInfo) -> list[str]:
    sizes = any(isinstance(item, Kind) and item.name == "size" for item in field.metadata)
    highest = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    words = []
    for item in field.metadata:
        match item:
            case Ge() if highest is not None:
                words.append(f"{item.ge} to {highest}")
            case Ge():
                words.append(f"at least {written(item.ge, 'size' if sizes else '')}")
            case Gt():
                words.append(f"above {item.gt}")
            case MinLen() if item.min_length > 1:
                words.append(f"at least {item.min_length} characters")
    return words


def absent_text(field: FieldInfo) -> str | None:
    """Return what holds while a key without a fixed default is not set, or None where there is a fixed one."""
    extra = field.json_schema_extra
    return str(extra["absent"]) if isinstance(extra, dict) and "absent" in extra else None


def default_text(field: FieldInfo) -> str:
    """Return the default as it would be written, in backquotes, or words where it depends."""
    return absent_text(field) or f"`{written(field.default, type_words(field))}`"


def example_text(field: FieldInfo) -> str:
    """Return a value as it would be written: the example where there is one, else the default."""
    return written(field.examples[0] if field.examples else field.default, type_words(field))


def written(value: Any, kind: str = "") -> str:
    """Write a value as YAML on one line, as `pagein.config` reads it back; sizes and durations with units."""
    if kind.startswith("size") and isinstance(value, int):
        return _in_units(value, [("TiB", 1024**4), ("GiB", 1024**3), ("MiB", 1024**2), ("KiB", 1024)], "")
    if kind == "size or share" and isinstance(value, float):
        return f"{100 * value:.10g}%"
    if kind.startswith("duration") and value == math.inf:
        return "-1"
    if kind.startswith("duration") and isinstance(value, float):
        return (
            _in_units(round(value * 1000), [("d", 86400_000), ("h", 3600_000), ("m", 60_000), ("s", 1000)], "ms")
            if value
            else "0s"
        )
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_flow(str(k))}: {_flow(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    text = str(value.value if isinstance(value, Enum) else value)
    return text if _reads_as(text, text) else json.dumps(text)


def _flow(value: Any) -> str:
    """Write a value inside brackets, where commas and braces have a meaning."""
    text = written(value)
    return text if not isinstance(value, str) or _reads_as(f"[{text}]", [value]) else json.dumps(value)


def _reads_as(text: str, value: Any) -> bool:
    try:
        return bool(read_value(text) == value)
    except ValueError:
        return False


def _in_units(count: int, units: list[tuple[str, int]], smallest: str) -> str:
    """Write a count in the largest unit that divides it, so that nothing is rounded."""
    for unit, size in units:
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}{smallest}"
