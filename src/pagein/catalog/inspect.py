"""What a model file or folder is and needs: told from the headers, never from the extension alone."""

from __future__ import annotations

from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad
from pagein.catalog.ctranslate2 import MODEL_NAME, is_ctranslate2
from pagein.catalog.describe import (
    describe_ctranslate2,
    describe_gguf,
    describe_onnx,
    describe_ort,
    describe_safetensors,
)
from pagein.catalog.folder import files_in, inside
from pagein.catalog.gguf import is_gguf
from pagein.catalog.model import Format, ModelInfo
from pagein.catalog.ort import is_ort
from pagein.catalog.safetensors import is_safetensors
from pagein.catalog.split.describe import describe_split, is_split, is_unfinished
from pagein.errors import BadModelFile

SNIFFED = 128
"""Bytes at the start of a file that tell its format."""
_PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt"}
_PICKLE_HINT = (
    "a pickle can run any code when it is loaded; convert it to safetensors, GGUF or ONNX "
    "(most models are also published in one of these)"
)
_READ_HINT = "GGUF, safetensors, ONNX, ORT and CTranslate2 are read"
_SUFFIXES = {Format.GGUF: ".gguf", Format.ONNX: ".onnx", Format.ORT: ".ort", Format.SAFETENSORS: ".safetensors"}
"""What each format is called in a folder, in the order in which they are looked for; the header decides then."""


def inspect(path: Path) -> ModelInfo:
    """Return what the headers of a model say; raises BadModelFile with file, fault and numbers.

    ``ModelInfo.path`` is what an engine is given: the file to load, or the folder where the model is one.
    """
    try:
        if path.is_dir():
            return _inspect_folder(path)
        return _inspect_file(path)
    except OSError as error:
        raise bad(path, f"cannot be read: {error.strerror}") from error


def tell_format(path: Path) -> Format:
    """Tell the format of one file from its first bytes; raises BadModelFile for an unknown or refused one."""
    with BoundedFile(path) as file:
        if file.size == 0:
            raise bad(path, "is empty")
        start = file.at(0, min(SNIFFED, file.size), "the start")
    if is_gguf(start):
        return Format.GGUF
    if is_ort(start):
        return Format.ORT
    if is_safetensors(start):
        return Format.SAFETENSORS
    if is_ctranslate2(start):
        return Format.CTRANSLATE2
    _refuse_known(path, start)
    if start[:1] == b"\x08":  # field 1 (ir_version) as a varint: ONNX has no magic; its reader checks the rest
        return Format.ONNX
    raise bad(path, "is of no format that Pagein knows", hint=_READ_HINT)


def _refuse_known(path: Path, start: bytes) -> None:
    """Raise a clear error for what is recognised but not read."""
    if start[:1] == b"\x80" or start[:4] == b"PK\x03\x04":
        raise bad(path, "is a Python pickle or an archive of one, which is refused", hint=_PICKLE_HINT)
    if start.startswith(b"version https://git-lfs"):
        raise bad(path, "is a Git LFS pointer, not the file itself", hint="fetch it with `git lfs pull`")
    if start[4:8] == b"TFL3":
        raise bad(path, "is a TensorFlow Lite model, which is not read")
    if start.startswith(b"\x89HDF"):
        raise bad(path, "is an HDF5 file, which is not read")
    if start.lstrip()[:1] in (b"<", b"{"):
        raise bad(path, "is a text file, not a model")


def _inspect_file(path: Path) -> ModelInfo:
    kind = tell_format(path)
    if kind is Format.GGUF:
        return describe_gguf(path)
    if kind is Format.ONNX:
        return describe_onnx(path, [path])
    if kind is Format.ORT:
        return describe_ort(path, [path])
    if kind is Format.SAFETENSORS:
        return describe_safetensors(path, [path])
    if path.name != MODEL_NAME:
        raise bad(path, f"is a CTranslate2 model, which is loaded as a folder with {MODEL_NAME} in it")
    return describe_ctranslate2(path.parent, path)


def _inspect_folder(folder: Path) -> ModelInfo:
    if is_split(folder):
        return describe_split(folder)
    names = files_in(folder)
    if is_unfinished(names):
        hint = "run 'pagein split apply' again, it goes on"
        raise bad(folder, "holds parts of a model and no split_plan.json: its split is not finished", hint=hint)
    if MODEL_NAME in names and _format_or_none(folder / MODEL_NAME) is Format.CTRANSLATE2:
        return describe_ctranslate2(folder, folder / MODEL_NAME)
    for kind, suffix in _SUFFIXES.items():
        found = [inside(folder, name) for name in names if name.lower().endswith(suffix)]
        if found:
            return _describe_found(folder, kind, found)
    pickles = [name for name in names if Path(name).suffix.lower() in _PICKLES]
    if pickles:
        raise bad(folder, f"holds its weights as a pickle only ({pickles[0]}), which is refused", hint=_PICKLE_HINT)
    raise bad(folder, f"holds no model among its {len(names)} files", hint=_READ_HINT)


def _describe_found(folder: Path, kind: Format, found: list[Path]) -> ModelInfo:
    for path in found:
        told = tell_format(path)
        if told is not kind:
            raise bad(path, f"is named like {kind.value}, but is {told.value}")
    if kind is Format.GGUF:
        return describe_gguf(_only_model(folder, found))
    if kind is Format.ONNX:
        return describe_onnx(folder, found)
    if kind is Format.ORT:
        return describe_ort(folder, found)
    return describe_safetensors(folder, found)


def _only_model(folder: Path, found: list[Path]) -> Path:
    """Return the one GGUF model of a folder: the first part of a split one, not its vision projector."""
    models = [path for path in found if "mmproj" not in path.name.lower()]
    firsts = [path for path in models if "-of-" not in path.name or "-00001-of-" in path.name]
    if len(firsts) != 1:
        raise bad(
            folder,
            f"holds {len(firsts)} GGUF models: {', '.join(path.name for path in (firsts or models)[:8])}",
            hint="name the file",
        )
    return firsts[0]


def _format_or_none(path: Path) -> Format | None:
    """Tell the format of one file, or None for what is of no known format (not for what cannot be opened)."""
    try:
        return tell_format(path)
    except BadModelFile:
        return None
