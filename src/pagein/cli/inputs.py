"""What ``pagein run`` was given: a prompt, a text file, a recording or an image, told by its first bytes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from pagein.errors import BadUsage
from pagein.units import format_bytes

_LARGEST = 1024**3
"""Bytes read from a file or standard input at most; the daemon has a lower limit of its own (`server.max_body`)."""


class Kind(Enum):
    """What an input is."""

    TEXT = "text"
    AUDIO = "audio"
    IMAGE = "image"


@dataclass(frozen=True, slots=True)
class Input:
    """One input with its bytes, and the file name that goes with an upload."""

    kind: Kind
    data: bytes
    name: str
    mime: str

    @property
    def text(self) -> str:
        """The input as text; only for `Kind.TEXT`."""
        return self.data.decode("utf-8")


_MAGIC: tuple[tuple[int, bytes, Kind, str], ...] = (
    (8, b"WAVE", Kind.AUDIO, "audio/wav"),
    (0, b"fLaC", Kind.AUDIO, "audio/flac"),
    (0, b"OggS", Kind.AUDIO, "audio/ogg"),
    (0, b"ID3", Kind.AUDIO, "audio/mpeg"),
    (0, b"\xff\xfb", Kind.AUDIO, "audio/mpeg"),
    (0, b"\xff\xf3", Kind.AUDIO, "audio/mpeg"),
    (4, b"ftypM4A", Kind.AUDIO, "audio/mp4"),
    (0, b"\x1aE\xdf\xa3", Kind.AUDIO, "audio/webm"),
    (0, b"\x89PNG", Kind.IMAGE, "image/png"),
    (0, b"\xff\xd8\xff", Kind.IMAGE, "image/jpeg"),
    (8, b"WEBP", Kind.IMAGE, "image/webp"),
    (0, b"GIF8", Kind.IMAGE, "image/gif"),
    (0, b"BM", Kind.IMAGE, "image/bmp"),
)
"""Offset, bytes there, kind and media type."""
_MEDIA_SUFFIXES = frozenset(
    {".wav", ".flac", ".ogg", ".mp3", ".m4a", ".webm", ".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".txt", ".md"}
)


def read_input(given: str) -> Input:
    """Read what the argument names: ``-`` for standard input, a file, or else the prompt itself."""
    if given == "-":
        return recognise(sys.stdin.buffer.read(_LARGEST), "standard input")
    path = Path(given)
    if _is_file(path):
        if path.stat().st_size > _LARGEST:
            raise BadUsage(f"{given} has {format_bytes(path.stat().st_size)}, the limit is {format_bytes(_LARGEST)}")
        try:
            return recognise(path.read_bytes(), path.name)
        except OSError as error:
            raise BadUsage(f"cannot read {given}: {error.strerror}") from error
    if path.suffix.lower() in _MEDIA_SUFFIXES and not any(c.isspace() for c in given):
        raise BadUsage(f"there is no file {given!r}", hint="a prompt that looks like a file name goes through '-'")
    return Input(Kind.TEXT, given.encode(), "prompt", "text/plain")


def recognise(data: bytes, name: str) -> Input:
    """Tell what the bytes are; raises BadUsage for what is neither sound, image nor UTF-8 text."""
    if not data.strip():
        raise BadUsage(f"{name} is empty")
    if _is_text(data):
        return Input(Kind.TEXT, data, name, "text/plain")
    for offset, magic, kind, mime in _MAGIC:
        if data[offset : offset + len(magic)] == magic:
            return Input(kind, data, name, mime)
    raise BadUsage(f"{name} is neither a recording, an image nor UTF-8 text", hint="WAV, FLAC, OGG, MP3, PNG, JPEG …")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a long prompt is no file name
        return False


def _is_text(data: bytes) -> bool:
    try:
        return "\0" not in data.decode("utf-8")
    except UnicodeDecodeError:
        return False
