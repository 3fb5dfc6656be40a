"""Sizes and durations: parsed and printed at the edges only, integers and seconds inside."""

from __future__ import annotations

import re

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*$", re.IGNORECASE)
_EXPONENT = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_DURATION = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*$", re.IGNORECASE)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``6GiB``, ``500 MB``, ``1.5G`` or a plain number.

    ``KiB``/``MiB``/… count in 1024; ``KB``/``MB``/… in 1000; a bare ``K``/``M``/``G`` in 1024, as most memory tools do.
    Raises ValueError for anything else.
    """
    if isinstance(text, bool):
        raise ValueError(f"not a size: {text!r}")
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.match(text)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write it as 6GiB, 500MB or a number of bytes")
    number, prefix, binary = match.groups()
    decimal = text.strip().lower().endswith("b") and not binary and prefix
    base = 1000 if decimal else 1024
    return int(float(number) * base ** _EXPONENT[prefix.lower()])


def parse_percent(text: str) -> float | None:
    """Return the fraction of ``85%`` (0.85), or None when the text is not a percentage."""
    match = re.match(r"^\s*(\d+(?:\.\d+)?)\s*%\s*$", text)
    if match is None:
        return None
    fraction = float(match.group(1)) / 100
    if not 0 < fraction <= 1:
        raise ValueError(f"a percentage must lie above 0 % and at most 100 %: {text!r}")
    return fraction


def format_bytes(count: int | None) -> str:
    """Print bytes for people: ``7.9 GiB``, ``512 B``; ``unknown`` for None."""
    if count is None:
        return "unknown"
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit in ("B", "KiB") or abs(value) >= 100 else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def parse_duration(text: str | float) -> float:
    """Return the seconds of ``5m``, ``30s``, ``250ms``, ``1h`` or a plain number of seconds; ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError(f"not a duration: {text!r}")
    if isinstance(text, int | float):
        if text < 0:
            raise ValueError(f"a duration cannot be negative: {text}")
        return float(text)
    match = _DURATION.match(text)
    if match is None:
        raise ValueError(f"not a duration: {text!r}; write it as 250ms, 30s, 5m or 1h")
    number, unit = match.groups()
    return float(number) * _SECONDS[(unit or "s").lower()]


def format_duration(seconds: float | None) -> str:
    """Print seconds for people: ``250 ms``, ``1.8 s``, ``5m00s``, ``2h05m``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
