"""Environment variables that override the file: ``PAGEIN_SERVER__PORT=0`` sets ``server.port``.

A variable that names nothing is refused like an unknown key: a misspelt limit must not be dropped silently.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagein.config.faults import Fault, Key, Origin
from pagein.config.schema import ALIASES, Model, Settings, section_of
from pagein.config.source import read_value
from pagein.config.values import did_you_mean

PREFIX = "PAGEIN_"
RESERVED = frozenset({"PAGEIN_CONFIG", "PAGEIN_CONTROL_FD", "PAGEIN_DEBUG", "PAGEIN_URL"})
"""Variables with the prefix that are no settings; they are read elsewhere."""

_PATHS = ("model", "state_dir")
_LISTS = ("cors", "capabilities", "cpus")
_MAPPINGS = ("compute_lock",)
_FREE = ("env", "options")
"""Keys of a model whose own keys are free."""


@dataclass(frozen=True, slots=True)
class Override:
    """One value from the environment."""

    key: Key
    value: Any
    origin: Origin


class _Unusable(ValueError):
    """The variable does not name a setting, or its value cannot be read; the message goes into the fault."""


def read_environment(environ: Mapping[str, str], models: Collection[str]) -> tuple[list[Override], list[Fault]]:
    """Return the overrides in the environment, and what is wrong there; ``models`` are those of the file."""
    overrides: dict[Key, Override] = {}
    faults: list[Fault] = []
    for variable in sorted(environ):
        if not variable.startswith(PREFIX) or variable in RESERVED:
            continue
        origin = Origin((), variable=variable)
        try:
            key = _target(variable, models)
            origin = Origin(key, variable=variable)
            if key in overrides:
                raise _Unusable(f"sets the same key as {overrides[key].origin.variable}: give one of them")
            overrides[key] = Override(key, _value(key, environ[variable]), origin)
        except ValueError as error:
            faults.append(Fault(str(error), origin))
    return list(overrides.values()), faults


def variable_name(key: Key) -> str:
    """Return the variable of a key, as a shell can set it: ``PAGEIN_MODELS__CHAT__CONTEXT``."""
    return PREFIX + "__".join(_plain(str(part)) for part in key)


def _plain(word: str) -> str:
    return re.sub(r"[^A-Za-z0-9]", "_", word).upper()


def _target(variable: str, models: Collection[str]) -> Key:
    """Return the key that a variable names."""
    head, _, rest = variable.removeprefix(PREFIX).partition("__")
    top = head.lower()
    if top == "budget":
        return ("budget", _pool(rest) if rest else "ram")
    if top == "models" and rest:
        return _model_target(variable, rest, models)
    section = section_of((top,))
    if section is not None and rest.lower() in section.model_fields:
        return (top, rest.lower())
    if top == "state_dir" and not rest:
        return (top,)
    if (section is not None or top == "models") and not rest:
        raise _Unusable(f"names a whole section: set one of its keys, such as {PREFIX}{head}__{_example(top)}")
    raise _Unusable(f"no such setting{did_you_mean(variable, _known(models))}")


def _pool(rest: str) -> str:
    match = re.fullmatch(r"cuda[_:]?([0-9]+)", rest, re.IGNORECASE)
    return f"cuda:{match.group(1)}" if match else rest.lower()


def _model_target(variable: str, rest: str, models: Collection[str]) -> Key:
    """Match ``MY_MODEL__CONTEXT`` to the model ``my-model``; an exact spelling wins."""
    found = [name for name in models if _plain(rest).startswith(f"{_plain(name)}__")]
    exact = [name for name in found if rest.startswith(f"{name}__")]
    longest = max((len(name) for name in exact or found), default=0)
    best = [name for name in exact or found if len(name) == longest]
    if not best:
        listing = ", ".join(models) or "none"
        meant = did_you_mean(variable, _known(models))
        raise _Unusable(f"no such model in the file ({listing}){meant}")
    if len(best) > 1:
        raise _Unusable(f"means {' and '.join(best)}: write the name as in the file")
    field, _, inner = rest[longest + 2 :].partition("__")
    name = ALIASES.get(field.lower(), field.lower())
    if name in _FREE and inner:
        return ("models", best[0], name, inner if name == "env" else inner.lower())
    if name in _FREE:
        raise _Unusable(f"names a whole section: set one of its keys, such as {variable}__NAME")
    if name not in Model.model_fields or inner:
        raise _Unusable(f"no such setting{did_you_mean(variable, _known(models))}")
    return ("models", best[0], name)


def _example(top: str) -> str:
    section = section_of((top,))
    return next(iter(section.model_fields)).upper() if section is not None else "NAME__CONTEXT"


def _known(models: Collection[str]) -> list[str]:
    """Return every variable that would be understood, for the suggestion."""
    keys: list[Key] = [("budget",), ("state_dir",), ("budget", "ram"), ("budget", "cuda:0")]
    for top in Settings.model_fields:
        section = section_of((top,))
        keys += [(top, name) for name in section.model_fields] if section is not None else []
    keys += [("models", model, field) for model in models for field in [*Model.model_fields, *ALIASES]]
    return [variable_name(key) for key in keys]


def _value(key: Key, text: str) -> Any:
    """Read the text of a variable: lists as ``a,b`` or ``[a, b]``, options and mappings as YAML, paths from here."""
    name = key[-1]
    if key[2:3] == ("options",) or (name in _MAPPINGS and text.lstrip().startswith("{")):
        return read_value(text)
    if key[2:3] == ("env",):
        return text
    if name in _LISTS or (name == "command" and text.lstrip().startswith("[")):
        return read_value(text) if text.lstrip().startswith("[") else [part.strip() for part in text.split(",")]
    if name in _PATHS and text.strip():
        return _absolute(text)
    return text


def _absolute(text: str) -> str:
    try:
        return str(Path.cwd() / Path(text).expanduser())
    except RuntimeError as error:
        raise _Unusable(f"{text!r} names no home folder: {error}") from None
