"""Types of single settings: how each is written, read and refused, in words that need no Python."""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationInfo

from pagein.units import format_bytes, parse_bytes, parse_duration, parse_percent

SMALLEST_BUDGET = 1024**2
"""Bytes; a smaller figure is a forgotten unit (``budget: 6``)."""
_POOL = re.compile(r"ram|cuda:(0|[1-9][0-9]?)")
_DEVICE = re.compile(r"cpu|gpu|auto|cuda:(0|[1-9][0-9]?)")
_LOCKED = re.compile(r"cpu|cuda:(0|[1-9][0-9]?)")
_FOR_EVER = re.compile(r"\s*-1(\.0)?\s*(ms|s|m|h|d)?\s*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class Kind:
    """How a type is called on the reference page; pydantic ignores it."""

    name: str


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that was probably meant, or None."""
    folded = {name.lower(): name for name in known}
    found = difflib.get_close_matches(word.lower(), folded, n=1, cutoff=0.6)
    return folded[found[0]] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean X?`` for the end of a message, or nothing."""
    name = nearest(word, known)
    return f"; did you mean {name}?" if name else ""


def is_loopback(host: str) -> bool:
    """Tell whether an address to listen on can be reached from this machine only."""
    try:
        return host.lower() == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _size(value: Any) -> int:
    if isinstance(value, str | int):
        return parse_bytes(value)
    raise ValueError(f"not a size: {value!r}; write it as 6GiB, 500MB or a whole number of bytes")


def _duration(value: Any) -> float:
    if isinstance(value, str | int | float):
        return parse_duration(value)
    raise ValueError(f"not a duration: {value!r}; write it as 250ms, 30s, 5m or a number of seconds")


def _whole(value: Any) -> Any:
    if isinstance(value, bool | float):
        raise ValueError(f"must be a whole number, got {str(value).lower()}")
    return value


def parse_keep_alive(value: Any) -> float:
    """Return seconds; infinity for ``-1``, with or without a unit, as Ollama reads it. Raises ValueError."""
    if isinstance(value, str | int | float) and not isinstance(value, bool) and _FOR_EVER.fullmatch(str(value)):
        return math.inf
    try:
        return _duration(value)
    except ValueError as error:
        raise ValueError(f"{error}; -1 means never for being idle") from None


def _size_or_share(value: Any, what: str = "budget", wanted: str = "a size (6GiB) or a share (85%)") -> int | float:
    if isinstance(value, str) and re.fullmatch(r"\s*[0-9]*\.[0-9]+\s*", value):
        value = float(value)  # an environment variable is always text
    if isinstance(value, float):
        if 0 < value <= 1:
            return value
        size = f" or {value:g}GiB" if math.isfinite(value) and value > 0 else ""
        raise ValueError(f"a share must be above 0 and at most 1, got {value:g}; write it as 0.85, 85%{size}")
    if isinstance(value, str) and (share := parse_percent(value)) is not None:
        return share
    try:
        count = _size(value)
    except ValueError as error:
        raise ValueError(f"{str(error).split(';')[0]}; write {wanted}") from None
    if count < SMALLEST_BUDGET:
        least = format_bytes(SMALLEST_BUDGET)
        raise ValueError(f"a {what} of {format_bytes(count)} is less than {least}; write {wanted}")
    return count


def _margin(value: Any) -> int | float:
    return _size_or_share(value, "margin", "a size (256MiB) or a share (10%)")


def _pool(name: str) -> str:
    if _POOL.fullmatch(name):
        return name
    raise ValueError(f"there is no memory pool {name!r}: a pool is ram or cuda:N (cuda:0){_pool_meant(name)}")


def _pool_meant(name: str) -> str:
    return did_you_mean(name, ["ram", "cuda:0"])


def _device(value: Any) -> str:
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        return value
    meant = did_you_mean(str(value), ["cpu", "gpu", "auto", "cuda:0"])
    raise ValueError(f"must be cpu, gpu, auto or cuda:N, got {value!r}{meant}")


def _compute_lock(value: Any) -> bool | dict[str, bool]:
    if isinstance(value, dict):
        return {_locked_device(name): _truth(item, f" for {name!r}") for name, item in value.items()}
    return _truth(value, ", or a mapping such as {cpu: true, cuda:0: false}")


def _locked_device(name: Any) -> str:
    if isinstance(name, str) and _LOCKED.fullmatch(name):
        return name
    meant = did_you_mean(str(name), ["cpu", "cuda:0"])
    raise ValueError(f"a device that computes is cpu or cuda:N (cuda:0), not {name!r}{meant}")


def _truth(value: Any, where: str) -> bool:
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"  # an environment variable is always text
    if isinstance(value, bool):
        return value
    got = f", got {value!r}" if isinstance(value, str | int | float) else ""
    raise ValueError(f"must be true or false{where}{got}")


def _model_name(name: str) -> str:
    if _NAME.fullmatch(name):
        return name
    raise ValueError(
        "a model's name starts with a letter or a digit, goes on with those or . _ - and has at most 64 of them"
    )


def _command(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(f"cannot be split into arguments: {str(error).lower()}") from None


def _variable_name(name: str) -> str:
    if re.fullmatch(r"[^=\0]+", name):
        return name
    raise ValueError(f"not a name of an environment variable: {name!r}")


def _variable_text(value: Any) -> Any:
    """A whole number becomes text, since `OMP_NUM_THREADS: 2` has one meaning only; all else must be quoted."""
    if isinstance(value, str) and "\0" in value:
        raise ValueError("an environment variable cannot hold a zero byte")
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _path_text(value: Any) -> Any:
    if isinstance(value, str) and (not value.strip() or "\0" in value):
        raise ValueError("must name a file or folder")
    return value


def _path(path: Path, info: ValidationInfo) -> Path:
    """Expand ``~``; a relative path starts at the folder of the configuration file, where there is one."""
    try:
        full = path.expanduser()
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} names no home folder: {error}") from None
    base = (info.context or {}).get("base")
    return base / full if base is not None else full


_PATH_OPTIONS = ("trust", "shards")
"""Options of engines that name a file or a folder anywhere; others name one beside the model."""


def _with_whole_paths(options: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
    """Start relative paths among an engine's options where those of models start."""
    paths = {name: options[name] for name in _PATH_OPTIONS if isinstance(options.get(name), str)}
    return {**options, **{name: str(_path(Path(_path_text(text)), info)) for name, text in paths.items()}}


Size = Annotated[int, BeforeValidator(_size), Kind("size")]
"""Bytes; written as ``6GiB``, ``500MB`` or a number."""
Duration = Annotated[float, BeforeValidator(_duration), Kind("duration")]
"""Seconds; written as ``30s``, ``5m``, ``250ms`` or a number."""
KeepAlive = Annotated[float, PlainValidator(parse_keep_alive), Kind("duration or `-1`")]
"""Seconds; infinity where written as ``-1``."""
SizeOrShare = Annotated[int | float, PlainValidator(_size_or_share), Kind("size or share")]
"""Bytes (int), or a share of what the machine has (float above 0, at most 1); written as ``6GiB`` or ``85%``."""
Margin = Annotated[int | float, PlainValidator(_margin), Kind("size or share")]
"""The same, the share being one of what it is added to."""
ComputeLock = Annotated[bool | dict[str, bool], PlainValidator(_compute_lock), Kind("true, false, or those by device")]
"""One answer for every device, or one for each of some (``cpu``, ``cuda:N``)."""
Count = Annotated[int, BeforeValidator(_whole), Kind("whole number")]
"""A whole number; ``true`` and ``1.5`` are none."""
FilePath = Annotated[Path, BeforeValidator(_path_text), AfterValidator(_path), Kind("path")]
"""A file or folder; absolute once a configuration was loaded."""
Pool = Annotated[str, AfterValidator(_pool), Kind("pool")]
"""``ram`` or ``cuda:N``."""
Device = Annotated[str, BeforeValidator(_device), Kind("`cpu`, `gpu`, `auto`, `cuda:N`")]
"""``cpu``, ``gpu``, ``auto`` or ``cuda:N``."""
ModelName = Annotated[str, AfterValidator(_model_name), Kind("name")]
"""The name of a model, as clients write it."""
Command = Annotated[list[str], BeforeValidator(_command), Field(min_length=1), Kind("command line")]
"""Arguments of a program: a list, or one line that is split as a shell would."""
EngineOptions = Annotated[dict[str, Any], AfterValidator(_with_whole_paths), Kind("name: value")]
"""Options of an engine or a recipe, which the engine itself checks; paths among them absolute once loaded."""
Environment = Annotated[
    dict[Annotated[str, AfterValidator(_variable_name)], Annotated[str, BeforeValidator(_variable_text)]],
    Kind("name: text"),
]
"""Environment variables."""
