"""The engine table: what the daemon knows about each engine without importing it.

Third-party engines that register in the entry-point group ``pagein.engines`` and are not listed get a generic row.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from pagein.catalog.model import Format
from pagein.protocol import Capability
from pagein.units import parse_bytes

GROUP = "pagein.engines"
BUILT_IN_SERVER = "builtin"
"""Value of llama_cpp's option ``server`` that keeps to the library even where a llama-server is on the PATH."""


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One engine, as data."""

    name: str
    formats: frozenset[Format]
    """Formats that it loads; empty for one that takes a command line."""
    capabilities: frozenset[Capability]
    """What its models offer unless model or recipe say otherwise."""
    base_bytes: int
    """Resident size of a worker with its libraries loaded and no model."""
    packages: tuple[tuple[str, ...], ...]
    """Distributions that must be installed and give its version; of each group the first that is there counts."""
    extra: str | None
    """Pagein's extra that installs it; None where nothing is to install."""
    gpu: bool = False
    """True where ``device: auto`` may put it on a GPU."""


ENGINES: dict[str, EngineRow] = {
    row.name: row
    for row in (
        EngineRow(
            name="llama_cpp",
            formats=frozenset({Format.GGUF}),
            capabilities=frozenset({Capability.CHAT, Capability.COMPLETION}),
            base_bytes=parse_bytes("56MiB"),
            packages=(("xllamacpp",),),
            extra="llamacpp",
            gpu=True,
        ),
        EngineRow(
            name="onnx",
            formats=frozenset({Format.ONNX, Format.ORT}),
            capabilities=frozenset(),
            base_bytes=parse_bytes("80MiB"),
            packages=(("onnxruntime", "onnxruntime-gpu"),),
            extra="onnx",
        ),
        EngineRow(
            name="whisper",
            formats=frozenset({Format.CTRANSLATE2}),
            capabilities=frozenset({Capability.TRANSCRIPTION}),
            base_bytes=parse_bytes("100MiB"),
            packages=(("faster-whisper",), ("ctranslate2",)),
            extra="whisper",
        ),
        EngineRow(
            name="transformers",
            formats=frozenset({Format.SAFETENSORS}),
            capabilities=frozenset({Capability.COMPLETION, Capability.EMBEDDING}),
            base_bytes=parse_bytes("460MiB"),
            packages=(("torch",), ("transformers",), ("greenlet",)),
            extra="torch",
        ),
        EngineRow(
            name="parts",
            formats=frozenset({Format.SPLIT}),
            capabilities=frozenset(),
            base_bytes=parse_bytes("460MiB"),
            packages=(("torch",), ("transformers",)),
            extra="torch",
        ),
        EngineRow(
            name="command",
            formats=frozenset(),
            capabilities=frozenset({Capability.CHAT, Capability.COMPLETION}),
            base_bytes=parse_bytes("40MiB"),
            packages=(),
            extra=None,
        ),
    )
}
"""Engines that come with Pagein. Base sizes are resident sizes of a worker, shared pages in full (a lone worker has
nobody to share them with), measured on Linux x86-64 with Python 3.11, onnxruntime 1.32, CTranslate2 4.8.5 and xllamacpp
2026.10: 38 MiB bare, 76 MiB with onnxruntime, 97 MiB with faster-whisper; what llama.cpp's server took beyond weights,
cache, buffers and vocabulary was 48 MiB, the worker included."""

BY_FORMAT: dict[Format, str] = {
    Format.GGUF: "llama_cpp",
    Format.ONNX: "onnx",
    Format.ORT: "onnx",
    Format.CTRANSLATE2: "whisper",
    Format.SAFETENSORS: "transformers",
    Format.SPLIT: "parts",
}
"""The engine of a format where the configuration names none."""


def find_row(name: str) -> EngineRow | None:
    """Return the row of an engine: its own, a generic one where another package registers it, or None."""
    if name in ENGINES:
        return ENGINES[name]
    for entry in entry_points(group=GROUP, name=name):
        package = entry.dist.name if entry.dist is not None else None
        return EngineRow(
            name=name,
            formats=frozenset(Format),
            capabilities=frozenset(),
            base_bytes=parse_bytes("512MiB"),
            packages=((package,),) if package else (),
            extra=None,
        )
    return None


def known_engines() -> list[str]:
    """The names of all engines that can be configured here."""
    return sorted({*ENGINES, *(entry.name for entry in entry_points(group=GROUP))})


def installed_version(row: EngineRow) -> str | None:
    """Name and version of the packages behind an engine, or None where one is missing; nothing is imported."""
    found: list[str] = []
    for group in row.packages:
        known = next((text for name in group if (text := _package(name)) is not None), None)
        if known is None:
            return None
        found.append(known)
    return ", ".join(found) or row.name


def is_installed(package: str) -> bool:
    """Tell whether a distribution is installed."""
    return _package(package) is not None


def _package(name: str) -> str | None:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None


def find_llama_server(options: Mapping[str, object]) -> Path | None:
    """The llama-server program that the llama_cpp engine will run, or None where it takes the library.

    The same rule as the engine's own: the option ``server``, else one on the PATH. A wanted program that is absent is
    None as well; the caller tells the two apart by the option.
    """
    wanted = options.get("server")
    if wanted == BUILT_IN_SERVER:
        return None
    found = shutil.which(wanted if isinstance(wanted, str) else "llama-server")
    return Path(found).resolve() if found else None


def program_version(program: Path) -> str:
    """The identity of a program by size and time, which costs no start of it; changes whenever it is replaced."""
    try:
        status = program.stat()
    except OSError:
        return f"{program.name} of unknown version"
    return f"{program.name} {status.st_size}-{status.st_mtime_ns}"


_X86_REPACKED = frozenset({"q4_0", "q4_k", "q2_k", "iq4_nl"})
_ARM_REPACKED = _X86_REPACKED | {"q8_0", "q5_k", "q6_k", "mxfp4"}
_AMX_REPACKED = frozenset({"q4_0", "q4_1", "q8_0", "q4_k", "q5_k", "q6_k", "iq4_xs"})


@lru_cache(maxsize=2)
def repacked_types(program: bool) -> frozenset[str]:
    """The ggml types that llama.cpp's CPU backend copies into a layout of its own, beside the mapped file.

    ``program``: a llama-server of the user's own may be built for AMX; the library's wheel is not. Source: ggml-cpu's
    ``repack.cpp`` and ``amx/``.
    """
    if platform.machine().lower() in ("arm64", "aarch64"):
        return _ARM_REPACKED
    return _X86_REPACKED | _AMX_REPACKED if program and _has_amx() else _X86_REPACKED


def _has_amx() -> bool:
    try:
        return "amx_int8" in Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
