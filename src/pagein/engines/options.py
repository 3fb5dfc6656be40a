"""Engine options: what the configuration gives under ``options``, checked against a dataclass."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar

from pagein.errors import ConfigError

Options = TypeVar("Options")


def read_options(kind: type[Options], given: Mapping[str, object], model: str) -> Options:
    """Return the options dataclass filled from what the configuration gives.

    Raises ConfigError that names the model, the option, and the nearest known one or the values that it takes.
    """
    types = typing.get_type_hints(kind)
    for name, value in given.items():
        if name not in types:
            raise ConfigError(f"model {model!r}: there is no option {name!r}{_nearest(name, list(types))}", model=model)
        if not _matches(value, types[name]):
            raise ConfigError(
                f"model {model!r}: option {name!r} takes {_words(types[name])}, not {value!r}", model=model
            )
    required = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]  # type: ignore[arg-type]
    for name in required:
        if name not in given:
            raise ConfigError(f"model {model!r}: option {name!r} is required", model=model)
    return kind(**given)


def _nearest(name: str, known: list[str]) -> str:
    import difflib  # only for a mistake

    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(sorted(known))}"


def _matches(value: object, wanted: Any) -> bool:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is UnionType or origin is typing.Union:
        return any(_matches(value, part) for part in parts)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if origin is list:
        return isinstance(value, list) and all(_matches(item, parts[0]) for item in value)
    if wanted is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if wanted is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, wanted)


def _words(wanted: Any) -> str:
    origin, parts = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is UnionType or origin is typing.Union:
        return " or ".join(_words(part) for part in parts if part is not NoneType)
    if origin is Literal:
        return ", ".join(str(part) for part in parts)
    if origin is list:
        return f"a list of {_words(parts[0])}"
    words = {bool: "true or false", dict: "settings", int: "a whole number", float: "a number", str: "text"}
    return words.get(wanted, str(wanted))
