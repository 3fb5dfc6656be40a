"""Typed reading of a request's fields; every fault is a BadRequest that names the field."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

from pagein.errors import BadRequest

_UNUSED = frozenset({"model", "user"})
"""Fields that have no effect here and that clients send to every endpoint."""


class Fields:
    """The fields of one request, from JSON, a form or a query; values of forms are texts."""

    def __init__(self, values: Mapping[str, object], known: Iterable[str]) -> None:
        """Refuse fields that the endpoint does not know: an option is never dropped silently."""
        self._values = {name: value for name, value in values.items() if value is not None}
        names = sorted(set(known))
        for name in self._values:
            if name not in names and name not in _UNUSED:
                near = difflib.get_close_matches(name, names, 1)
                meant = f"did you mean {near[0]}?" if near else f"known: {', '.join(names)}"
                refuse(name, f"{name[:80]} is not a field of this endpoint; {meant}")

    def get(self, name: str) -> object:
        """Return the raw value, None where it is absent or null."""
        return self._values.get(name)

    def need(self, name: str) -> object:
        """Return the raw value of a field that must be there."""
        if name not in self._values:
            refuse(name, f"{name} is missing")
        return self._values[name]

    def text(self, name: str) -> str | None:
        """Return a text, None where it is absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            refuse(name, f"{name} must be a text")
        return value

    def choice(self, name: str, options: tuple[str, ...]) -> str:
        """Return one of the options; the first is the default."""
        value = self._values.get(name, options[0])
        if value not in options:
            refuse(name, f"{name} is {str(value)[:80]!r}; it must be one of {', '.join(options)}")
        return str(value)

    def whole(self, name: str, low: int, high: int) -> int | None:
        """Return a whole number within bounds, None where it is absent."""
        value = self._number(name)
        if value is None:
            return None
        if value != int(value) or not low <= value <= high:
            refuse(name, f"{name} is {value:g}; it must be a whole number from {low} to {high}")
        return int(value)

    def number(self, name: str, low: float, high: float) -> float | None:
        """Return a number within bounds, None where it is absent."""
        value = self._number(name)
        if value is not None and not low <= value <= high:
            refuse(name, f"{name} is {value:g}; it must lie between {low:g} and {high:g}")
        return value

    def flag(self, name: str) -> bool:
        """Return true or false; false where it is absent."""
        value = self._values.get(name, False)
        if isinstance(value, str) and value.lower() in ("true", "false"):
            return value.lower() == "true"
        if not isinstance(value, bool):
            refuse(name, f"{name} must be true or false")
        return value

    def _number(self, name: str) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        try:
            number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            refuse(name, f"{name} must be a number")
        return number


def refuse(name: str, message: str) -> NoReturn:
    """Raise the BadRequest for a field."""
    raise BadRequest(message, param=name[:80])
