"""The option ``kv`` of the engine: thresholds of the tiers, as `pagein tune kv` prints them, and bytes of two."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from pagein.errors import ConfigError
from pagein.kv.tiers.settings import KvSettings
from pagein.units import parse_bytes

_BYTES = ("memory", "host")
_AT_ONCE = 32
"""Turns at once unless it is set: requests are bounded before, and texts of one request for vectors share a pass."""


@dataclass(frozen=True, slots=True)
class KvOptions:
    """What was set."""

    settings: KvSettings
    memory: int | None
    """Most that KV may take on the device; the plan's context × parallel is the bound in any case."""
    host: int | None
    """Bytes of pinned host memory behind a GPU."""


def read_kv(given: Mapping[str, Any] | None, parallel: int, model: str) -> KvOptions:
    """Return what ``kv`` says, for a worker that holds ``parallel`` requests at once; raises ConfigError."""
    values = dict(given or {})
    known = [*_BYTES, *(field.name for field in fields(KvSettings))]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            meant = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"model {model!r}: option 'kv' has no {str(name)[:80]!r}; {meant}", model=model)
    sizes = {name: _size(values.pop(name, None), name, model) for name in _BYTES}
    try:
        settings = KvSettings(**{"active": max(parallel, _AT_ONCE), **values})
    except TypeError as error:
        raise ConfigError(f"model {model!r}: option 'kv': {error}", model=model) from error
    return KvOptions(settings, sizes["memory"], sizes["host"])


def _size(value: object, name: str, model: str) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, str | int) and not isinstance(value, bool):
            return parse_bytes(value) if isinstance(value, str) else value
        raise ValueError("it takes a size such as 512MiB")
    except ValueError as error:
        raise ConfigError(f"model {model!r}: option 'kv', {name}: {error}", model=model) from error
