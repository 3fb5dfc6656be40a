"""What a request wishes of its model beside the answer: how long it stays then, and how much context it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagein.config.values import parse_keep_alive
from pagein.errors import BadRequest

_CONTEXT_FIELDS = ("num_ctx", "max_context_length")
_FIELDS = ("keep_alive", *_CONTEXT_FIELDS)
_LONGEST_TIME = 40


@dataclass(frozen=True, slots=True)
class Wishes:
    """The wishes of one request; None where it has none."""

    keep_alive: float | None = None
    """Seconds that the model stays after its last request; infinity = never unloaded for being idle."""
    context: int | None = None
    """Tokens of context; a wish never reloads a model."""
    context_field: str = ""
    """Where the request says so."""


NO_WISHES = Wishes()


def wish_fields(fields: Mapping[str, object]) -> list[str]:
    """Return the fields of a body that are meant for Pagein alone, and that a strict engine would refuse."""
    found = [name for name in _FIELDS if name in fields]
    options = fields.get("options")
    return [*found, "options"] if isinstance(options, dict) and list(options) == ["num_ctx"] else found


def read_wishes(fields: Mapping[str, object]) -> Wishes:
    """Read the wishes in a JSON body; raises BadRequest that names the field."""
    contexts = [(name, fields[name]) for name in _CONTEXT_FIELDS if fields.get(name) is not None]
    options = fields.get("options")
    if isinstance(options, dict) and options.get("num_ctx") is not None:  # where Ollama's clients put it
        contexts.append(("options.num_ctx", options["num_ctx"]))
    keep = fields.get("keep_alive")
    if keep is None and not contexts:
        return NO_WISHES
    largest = max(((_tokens(name, value), name) for name, value in contexts), default=(None, ""))
    return Wishes(None if keep is None else _seconds(keep), *largest)


def _seconds(value: object) -> float:
    try:
        if isinstance(value, int | float) or (isinstance(value, str) and len(value) <= _LONGEST_TIME):
            return parse_keep_alive(value)
    except ValueError:
        pass
    got = f", not {str(value)[:_LONGEST_TIME]!r}" if isinstance(value, str | int | float) else ""
    raise BadRequest(
        "`keep_alive` must be a number of seconds, a duration such as '5m', 0 (unload right after) "
        f"or -1 (never for being idle){got}",
        param="keep_alive",
    )


def _tokens(name: str, value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise BadRequest(f"`{name}` must be a whole number of tokens, at least 1", param=name)
