"""Model files in a folder: a bounded walk that lets the catalog read the headers of what it finds."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.engines import BY_FORMAT, find_row
from pagein.catalog.inspect import inspect
from pagein.catalog.model import Format, ModelInfo
from pagein.catalog.split.describe import is_unfinished
from pagein.catalog.split.plan import PLAN_NAME
from pagein.errors import BadModelFile
from pagein.units import format_bytes

DEEPEST = 6
"""Levels below the folder that are looked at: enough for the cache of the Hugging Face hub."""
MOST_ENTRIES = 50_000
"""Files and folders looked at before the search ends."""
MOST_MODELS = 200
SMALLEST = 64 * 1024
"""Bytes of weights below which a file is a test's or a tool's, not a model to serve."""
_IGNORED = frozenset({"node_modules", "__pycache__", "site-packages", "blobs"})
_GRAPHS = (".onnx", ".ort")
_MEANINGLESS = re.compile(
    r"^(model|ggml-model|pytorch_model|weights|encoder|decoder)?([-_](fp16|fp32|f16|q\w+|quantized))?$"
)
_LATER_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_FIRST_PART = re.compile(r"-00001-of-\d{5}(?=\.gguf$)")


@dataclass(frozen=True, slots=True)
class Found:
    """A model that can be configured, with a name for it."""

    name: str
    info: ModelInfo


@dataclass(slots=True)
class Search:
    """What the search brought."""

    found: list[Found] = field(default_factory=list)
    skipped: dict[Path, str] = field(default_factory=dict)
    """Files that look like models, with the reason why they are none."""
    cut: str | None = None
    """The bound that ended the search, or None when everything was looked at."""


def find_models(folder: Path) -> Search:
    """Look for models in a folder and below; links to folders are not followed."""
    search, entries = Search(), 0
    names: set[str] = set()
    for here, folders, files in os.walk(folder):
        path = Path(here)
        entries += len(folders) + len(files)
        depth = len(path.relative_to(folder).parts)
        folders[:] = [] if depth >= DEEPEST else sorted(f for f in folders if f not in _IGNORED and f[0] != ".")
        for candidate in _candidates(path, sorted(files)):
            try:
                info = inspect(candidate)
            except BadModelFile as error:
                search.skipped[candidate] = error.message
                continue
            objection = _objection(info)
            if objection is not None:
                search.skipped[candidate] = f"{candidate}: {objection}"
                continue
            search.found.append(Found(_unique(_name(candidate), names), info))
        if entries > MOST_ENTRIES or len(search.found) > MOST_MODELS:
            search.cut = f"the limits are {MOST_ENTRIES} files and {MOST_MODELS} models"
            break
    return search


def _objection(info: ModelInfo) -> str | None:
    """Say why a readable model is not configured, or None."""
    if info.weight_bytes < SMALLEST:
        return f"has {format_bytes(info.weight_bytes)} of weights, less than {format_bytes(SMALLEST)}"
    if find_row(BY_FORMAT[info.format]) is None:
        return f"no engine here loads {info.format.value}"
    if info.format is Format.SAFETENSORS and not (info.path / "config.json").is_file():
        return "has no config.json beside it, which says what the weights are"
    return None


def _candidates(folder: Path, files: list[str]) -> Iterator[Path]:
    """Yield what may be a model in one folder: single files, or the folder where several files make one."""
    if PLAN_NAME in files or is_unfinished(files):
        yield folder  # a split model: its files are no models by themselves
        return
    for name in files:
        is_model = name.lower().endswith(".gguf") and "mmproj" not in name.lower()
        if is_model and (not _LATER_PART.search(name) or _FIRST_PART.search(name)):
            yield folder / name
    shards = [name for name in files if name.lower().endswith(".safetensors")]
    graphs = [name for name in files if name.lower().endswith(_GRAPHS)]
    plain = [name for name in graphs if Path(name).stem == "model"]
    if len(shards) == 1 and "config.json" not in files:
        yield folder / shards[0]
    elif shards or "model.bin" in files:
        yield folder
    if len(graphs) == 1 or len(plain) == 1:
        yield folder / (plain or graphs)[0]
    elif graphs and not shards:
        yield folder  # an encoder and its decoder


def _name(path: Path) -> str:
    """Return the name that says most: the file's own, or the nearest folder's where the file's says nothing."""
    words = [_FIRST_PART.sub("", path.name)] if path.is_file() else [path.name]
    stem = Path(words[0]).stem if path.is_file() else words[0]
    parents = [parent for parent in path.absolute().parents if parent.name]
    for word in (stem, *(parent.name for parent in parents)):
        if word.startswith("models--"):  # the hub's cache: models--owner--name/snapshots/revision
            return _slug(word.rpartition("--")[2])
        if _says_something(word):
            return _slug(word)
    return "model"


def _says_something(word: str) -> bool:
    generic = {"snapshots", "assets", "onnx", "data", "models", "resources"}
    is_revision = re.fullmatch(r"[0-9a-f]{40}", word) is not None
    return not _MEANINGLESS.match(word.lower()) and word.lower() not in generic and not is_revision


def _slug(word: str) -> str:
    plain = re.sub(r"[^a-z0-9._]+", "-", word.lower()).strip("-._")
    return plain[:48].rstrip("-._") or "model"


def _unique(name: str, taken: set[str]) -> str:
    number, candidate = 2, name
    while candidate in taken:
        candidate, number = f"{name}-{number}", number + 1
    taken.add(candidate)
    return candidate
