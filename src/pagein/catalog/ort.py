"""onnxruntime's own flat-buffer format (``.ort``): told by its identifier; only sizes are taken from it.

Layout: https://flatbuffers.dev/internals and onnxruntime's ``ort.fbs`` (InferenceSession: ort_version, model, …).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad

IDENTIFIER = b"ORTM"
_LONGEST_VERSION = 64
_LARGEST_VTABLE = 256


@dataclass(frozen=True, slots=True)
class OrtHeader:
    """What an ORT file says about itself."""

    path: Path
    size: int
    format_version: str
    """Version of the format, as onnxruntime counts it."""


def is_ort(start: bytes) -> bool:
    """Tell an ORT file by the identifier behind its root offset."""
    return start[4:8] == IDENTIFIER


def read_ort(path: Path) -> OrtHeader:
    """Check root, table and version of one file; raises BadModelFile."""
    with BoundedFile(path) as file:
        root, identifier = struct.unpack("<I4s", file.at(0, 8, "the identifier"))
        if identifier != IDENTIFIER:
            raise bad(path, "does not have the identifier ORTM")
        table = struct.unpack("<i", file.at(root, 4, "the root table"))[0]
        vtable = root - table
        length, width = struct.unpack("<HH", file.at(vtable, 4, "the root's field list"))
        if not 8 <= length <= _LARGEST_VTABLE or length % 2 or width < 4:
            raise bad(path, f"has a field list of {length} bytes for a table of {width}")
        version, model = struct.unpack("<HH", file.at(vtable + 4, 4, "the root's fields"))
        file.check(root, width, "the root table")
        if not 0 < version <= width - 4 or not 0 < model <= width - 4:
            raise bad(path, f"has no version or no model: fields at {version} and {model} of {width} bytes")
        target = root + model + struct.unpack("<I", file.at(root + model, 4, "the model's place"))[0]
        file.check(target, 4, "the model")
        return OrtHeader(path, file.size, _string(file, root + version))


def _string(file: BoundedFile, place: int) -> str:
    start = place + struct.unpack("<I", file.at(place, 4, "the version's place"))[0]
    length = struct.unpack("<I", file.at(start, 4, "the version's length"))[0]
    if length > _LONGEST_VERSION:
        raise bad(file.path, f"has a version of {length} bytes, the limit is {_LONGEST_VERSION}")
    return file.at(start + 4, length, "the version").decode("ascii", "replace")
