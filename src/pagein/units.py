"""Sizes and durations: parsed and printed at the edges only, integers and seconds inside."""

from __future__ import annotations

import re
from decimal import Decimal

_NUMBER = r"[0-9]{1,19}(?:\.[0-9]{1,12})?"
_SIZE = re.compile(rf"\s*({_NUMBER})\s*(?:([KMGT])(i)?)?(B)?\s*", re.IGNORECASE)
_EXPONENT = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_LARGEST = 2**63 - 1
_LONGEST = 1e12
_PERCENT = re.compile(rf"\s*({_NUMBER})\s*%\s*")
_DURATION_PART = re.compile(rf"\s*({_NUMBER})\s*(ms|s|m|h|d)", re.IGNORECASE)
_SECONDS = {
    "ms": Decimal("0.001"),
    "s": Decimal(1),
    "m": Decimal(60),
    "h": Decimal(3600),
    "d": Decimal(86400),
}


def parse_bytes(text: str | int) -> int:
    """Return the bytes of ``6GiB``, ``500 MB``, ``1.5G`` or a plain number.

    ``KiB``/``MiB``/… count in 1024; ``KB``/``MB``/… in 1000; a bare ``K``/``M``/``G`` in 1024, as most memory tools do.
    Raises ValueError for anything else.
    """
    if isinstance(text, bool):
        raise ValueError(f"not a size: {text!r}")
    if isinstance(text, int):
        return _checked(text, text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"not a size: {text!r}; write it as 6GiB, 500MB or a number of bytes")
    number, prefix, binary, b = match.groups()
    base = 1000 if prefix and b and not binary else 1024
    return _checked(int(Decimal(number) * base ** _EXPONENT[(prefix or "").lower()]), text)


def _checked(count: int, text: str | int) -> int:
    if count < 0:
        raise ValueError(f"a size cannot be negative: {text}")
    if count > _LARGEST:
        raise ValueError(f"too large a size: {text}; the largest is {_LARGEST} bytes")
    return count


def parse_percent(text: str) -> float | None:
    """Return the fraction of ``85%`` (0.85), or None when the text is not a percentage."""
    match = _PERCENT.fullmatch(text)
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
        digits = 0 if unit in ("B", "KiB") or abs(value) >= 99.95 else 1
        if round(abs(value), digits) < 1024:
            return f"{value:.{digits}f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def format_apart(first: int, second: int) -> tuple[str, str]:
    """Print two counts of bytes so that they differ where they do: in bytes where they would look alike."""
    texts = format_bytes(first), format_bytes(second)
    if texts[0] != texts[1] or first == second:
        return texts
    return f"{first:,} B", f"{second:,} B"


def parse_duration(text: str | float) -> float:
    """Return the seconds of ``5m``, ``30s``, ``250ms``, ``1h30m`` or a number of seconds; ValueError otherwise."""
    if isinstance(text, bool):
        raise ValueError(f"not a duration: {text!r}")
    if isinstance(text, int | float):
        if text < 0:
            raise ValueError(f"a duration cannot be negative: {text}")
        if not text <= _LONGEST:  # also catches nan
            raise ValueError(f"not a duration: {text}; the longest is {_LONGEST:g} seconds")
        return float(text)
    if re.fullmatch(rf"\s*{_NUMBER}\s*", text):
        return float(text)
    parts = list(_DURATION_PART.finditer(text))
    if not parts or "".join(part.group() for part in parts) != text.rstrip():
        raise ValueError(f"not a duration: {text!r}; write it as 250ms, 30s, 5m or 1h30m")
    return float(sum(Decimal(part.group(1)) * _SECONDS[part.group(2).lower()] for part in parts))


def format_duration(seconds: float | None) -> str:
    """Print seconds for people: ``250 ms``, ``1.8 s``, ``5m00s``, ``2h05m``; ``unknown`` for None."""
    if seconds is None:
        return "unknown"
    if round(seconds * 1000) < 1000:
        return f"{seconds * 1000:.0f} ms"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"
