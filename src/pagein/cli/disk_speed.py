"""The speed of the disk that holds a model: given, remembered from an earlier measurement, or measured now."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import time

from pagein.errors import BadUsage
from pagein.units import format_bytes, parse_bytes

MEASURE = "measure"
"""Value of ``--disk`` that measures again whatever is remembered."""
_REMEMBERED_FOR = 30 * 86_400
_LARGEST_FILE = 64 * 1024


@dataclass(frozen=True, slots=True)
class Speed:
    """Bytes per second, and where the figure comes from."""

    bytes_per_second: float
    source: str


def disk_speed(files: Sequence[Path], given: str | None) -> Speed:
    """Return the reading speed of the disk with these files; blocks for a second where it must be measured."""
    if given is not None and given != MEASURE:
        return Speed(parse_speed(given), "given")
    disk = str(os.stat(files[0]).st_dev)
    known = {} if given == MEASURE else _remembered()
    if disk in known:
        return Speed(known[disk], f"measured before; --disk {MEASURE} does it again")
    from pagein.weights.reading.disk import probe

    found = probe(files)
    _remember(disk, found.bytes_per_second)
    return Speed(found.bytes_per_second, f"measured now: {found.why}")


def parse_speed(text: str) -> float:
    """Return the bytes per second of ``1.5GB/s``; raises BadUsage."""
    try:
        speed = parse_bytes(text.strip().removesuffix("/s"))
    except ValueError as error:
        raise BadUsage(f"--disk: {error}", hint=f"write it as 1.5GB/s, or {MEASURE}") from None
    if not speed:
        raise BadUsage("--disk: a disk of 0 bytes per second gives nothing", hint=f"write it as 1.5GB/s, or {MEASURE}")
    return float(speed)


def format_speed(bytes_per_second: float) -> str:
    """Print a speed for people: ``1.4 GiB/s``."""
    return f"{format_bytes(int(bytes_per_second))}/s"


def _file() -> Path:
    import platformdirs

    return Path(platformdirs.user_cache_dir("pagein")) / "disk-speed.json"


def _entries() -> dict[str, dict[str, float]]:
    """What the file holds, as far as it can be read: a broken one is measured anew."""
    try:
        with _file().open(encoding="utf-8") as file:
            body = json.loads(file.read(_LARGEST_FILE))
        return {str(disk): {"speed": float(e["speed"]), "at": float(e["at"])} for disk, e in body.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _remembered() -> dict[str, float]:
    oldest = time() - _REMEMBERED_FOR
    return {disk: entry["speed"] for disk, entry in _entries().items() if entry["at"] > oldest and entry["speed"] > 0}


def _remember(disk: str, speed: float) -> None:
    path = _file()
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps({**_entries(), disk: {"speed": speed, "at": time()}}), encoding="utf-8")
        fresh.replace(path)
    except OSError:  # a home that cannot be written costs a second measurement, nothing else
        with suppress(OSError):
            fresh.unlink()
