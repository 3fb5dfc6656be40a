"""Names of tasks and parts: few characters, one case, so that no two of them can mean the same file."""

from __future__ import annotations

import re

LONGEST = 64
PATTERN = f"^[a-z0-9_.-]{{1,{LONGEST}}}$"
"""What a name looks like, as the messages say it."""
_NAME = re.compile(r"[a-z0-9_-][a-z0-9_.-]{0,63}")
"""No dot in front: ``.`` and ``..`` are folders, and drafts begin with one."""
_FILE = re.compile(r"(?P<part>[a-z0-9_-][a-z0-9_.-]{0,63})-(?P<digest>[0-9a-f]{12})\.safetensors")
DIGITS = 12
"""Hex digits of its digest in the name of a part's file."""


def is_name(text: object) -> bool:
    """Tell whether this is a name as plans have it."""
    return isinstance(text, str) and _NAME.fullmatch(text) is not None


def fold(text: object) -> str | None:
    """Return a name of any case as plans have it, or None where it is none.

    Only ASCII letters are folded: Unicode folds ``ſ`` to ``s`` and the Kelvin sign to ``k``, so that a name which no
    rule lists would become one that is listed.
    """
    if not isinstance(text, str) or len(text) > LONGEST or not text.isascii():
        return None
    folded = text.lower()
    return folded if is_name(folded) else None


def file_name(part: str, sha256: str) -> str:
    """Return the name of the file with this content of a part."""
    return f"{part}-{sha256[:DIGITS]}.safetensors"


def part_of_file(name: str) -> tuple[str, str] | None:
    """Return part and digest digits of a file's name, or None where it is not the name of a part's file."""
    match = _FILE.fullmatch(name)
    return (match["part"], match["digest"]) if match else None
