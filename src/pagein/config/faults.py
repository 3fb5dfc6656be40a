"""What is wrong with a configuration: where it stands, and plain words for it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic_core import ErrorDetails

from pagein.config.schema import ALIASES, Model, Section, Settings, section_of
from pagein.config.values import nearest
from pagein.errors import ConfigError

Key = tuple[str | int, ...]
"""Where a value stands: ``("models", "chat", "context")``."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from: a line of the file or an environment variable, and the key as it was written there."""

    key: Key
    line: int | None = None
    variable: str | None = None


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong."""

    message: str
    origin: Origin

    def __str__(self) -> str:
        key = dotted(self.origin.key)
        if self.origin.variable is not None:
            return f"{self.origin.variable}: {self.message}"
        where = f"line {self.origin.line}: " if self.origin.line is not None else ""
        return f"{where}{key}: {self.message}" if key else f"{where}{self.message}"


def config_error(source: str, faults: Iterable[Fault]) -> ConfigError:
    """Return one error that lists every fault, in the order of the file, the environment last."""
    listed = sorted(faults, key=lambda f: (f.origin.variable or "", f.origin.line or 0))
    count = "1 error" if len(listed) == 1 else f"{len(listed)} errors"
    return ConfigError(
        "\n  ".join([f"{source}: {count}", *map(str, listed)]),
        source=source,
        faults=[
            {
                "line": fault.origin.line,
                "variable": fault.origin.variable,
                "key": dotted(fault.origin.key),
                "message": fault.message,
            }
            for fault in listed
        ],
    )


def dotted(key: Key) -> str:
    """Write a key for people: ``models.chat.cpus[1]``; names with other characters in quotes."""
    text = ""
    for part in key:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            word = part if re.fullmatch(r"[A-Za-z0-9_:<-]{1,64}", part) else shown(part)
            text += f".{word}" if text else word
    return text


def shown(value: object) -> str:
    """Print a value of the configuration in one short line."""
    if isinstance(value, dict):
        return "a mapping of keys"
    if isinstance(value, list):
        return "a list"
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def known_keys(section: type[Section]) -> list[str]:
    """Return the keys of a section, other names of keys included."""
    return [*section.model_fields, *(ALIASES if section is Model else ())]


def unknown_key(key: Key) -> tuple[str, str | None]:
    """Return the message for a key that does not exist, and the key of its section that was probably meant."""
    section, word = section_of(key[:-1]) or Settings, str(key[-1])
    known = known_keys(section)
    meant = nearest(word, known)
    if meant is None:
        elsewhere = [f"{name}.{word}" for name in Settings.model_fields if word in _fields_of((name,))]
        elsewhere += [word] if word in Settings.model_fields and section is not Settings else []
        listing = f"did you mean {elsewhere[0]}?" if elsewhere else f"known here: {', '.join(section.model_fields)}"
        return f"unknown key; {listing}", None
    return f"unknown key; did you mean {meant}?", ALIASES.get(meant, meant)


def _fields_of(key: Key) -> Iterable[str]:
    section = section_of(key)
    return section.model_fields if section is not None else ()


def is_secret(key: Key) -> bool:
    """Tell whether a value must not be repeated in a message."""
    return key in (("server", "api_key"), ("state", "salt")) or "env" in key[2:]


def words(error: ErrorDetails, key: Key, value: object) -> str:
    """Turn one pydantic error about a value, as it was written, into words for people."""
    context: Mapping[str, Any] = error.get("ctx", {})
    got = "" if is_secret(key) else f", got {shown(value)}"
    match error["type"]:
        case "extra_forbidden":
            return unknown_key(key)[0]
        case "value_error":
            return _short(str(context["error"]))
        case "int_type" | "int_parsing" | "int_from_float" | "int_parsing_size":
            return f"must be a whole number{got}"
        case "bool_type" | "bool_parsing":
            return f"must be true or false{got}"
        case "string_type":
            quote = "; write it in quotes" if isinstance(value, bool | int | float) else ""
            return f"must be text{got}{quote}"
        case "path_type":
            return f"must be a path{got}"
        case "list_type":
            return f"must be a list such as [a, b]{got}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"must be a mapping of keys{got}"
        case "enum":
            choices = re.findall(r"'([^']*)'", context["expected"])
            meant = nearest(str(value), choices)
            return f"must be one of {', '.join(choices)}{got}" + (f"; did you mean {meant}?" if meant else "")
        case "too_short" | "string_too_short":
            thing = "characters" if error["type"] == "string_too_short" else "entries"
            return f"must have at least {context['min_length']} {thing}{'' if thing == 'characters' else got}"
    return _bound(error["type"], context, got) or _short(f"{error['msg'][:1].lower()}{error['msg'][1:]}")


def _bound(kind: str, context: Mapping[str, Any], got: str) -> str | None:
    names = {"greater_than": "above", "greater_than_equal": "at least", "less_than_equal": "at most"}
    limits = {"greater_than": "gt", "greater_than_equal": "ge", "less_than_equal": "le"}
    return f"must be {names[kind]} {context[limits[kind]]:g}{got}" if kind in names else None


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:297]}…"
