"""CTranslate2 models: ``model.bin`` with its table of variables, and the vocabulary beside it.

Layout: CTranslate2's ``model_spec.py`` (``ModelSpec._serialize``): version, name and revision of the specification, the
variables each with shape, type, bytes and data, then aliases. Data is stepped over.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad

MODEL_NAME = "model.bin"
OLDEST_VERSION, NEWEST_VERSION = 4, 6
"""Binary versions whose variables carry a type number."""
MOST_VARIABLES = 65_536
MOST_DIMENSIONS = 8
TYPES = {0: ("float32", 4), 1: ("int8", 1), 2: ("int16", 2), 3: ("int32", 4), 4: ("float16", 2), 5: ("bfloat16", 2)}
"""``enum class DataType``: name and bytes per value."""
_WIDTH_HINTS = ("encoder/conv1/weight", "decoder/embeddings/weight", "encoder/embeddings_0/weight")


@dataclass(slots=True)
class CTranslate2Model:
    """What a ``model.bin`` says about itself."""

    path: Path
    size: int
    specification: str
    parameters: int = 0
    weight_bytes: int = 0
    bytes_by_type: dict[str, int] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of the variables that tell width and vocabulary."""


def is_ctranslate2(start: bytes) -> bool:
    """Tell a ``model.bin`` by its version and the name of its specification (``WhisperSpec``)."""
    if len(start) < 6:
        return False
    version, length = struct.unpack_from("<IH", start)
    return 0 < version <= 64 and 4 < length <= 64 and start[6 : 6 + length].endswith(b"Spec\0")


def read_ctranslate2(path: Path) -> CTranslate2Model:
    """Read and check the variables of one ``model.bin``; raises BadModelFile."""
    with BoundedFile(path) as file:
        reader = _Reader(file)
        version = reader.u32("the version")
        if not OLDEST_VERSION <= version <= NEWEST_VERSION:
            raise bad(path, f"has binary version {version}; versions {OLDEST_VERSION} to {NEWEST_VERSION} are read")
        model = CTranslate2Model(path, file.size, reader.text("the specification's name"))
        reader.u32("the revision")
        count = reader.u32("the number of variables")
        if count > MOST_VARIABLES:
            raise bad(path, f"claims {count} variables, the limit is {MOST_VARIABLES}")
        seen: set[str] = set()
        for _ in range(count):
            _variable(reader, model, seen)
        _aliases(reader, seen)
        if reader.position != file.size:
            raise bad(path, f"ends at byte {reader.position}, the file has {file.size}")
        return model


class _Reader:
    """Reads forward."""

    def __init__(self, file: BoundedFile) -> None:
        self.file = file
        self.position = 0

    def take(self, count: int, what: str) -> bytes:
        data = self.file.at(self.position, count, what)
        self.position += count
        return data

    def u8(self, what: str) -> int:
        return self.take(1, what)[0]

    def u32(self, what: str) -> int:
        return int(struct.unpack("<I", self.take(4, what))[0])

    def text(self, what: str) -> str:
        """A length of two bytes, then text with a zero at its end."""
        length = struct.unpack("<H", self.take(2, what))[0]
        data = self.take(length, what)
        if not data.endswith(b"\0"):
            raise bad(self.file.path, f"{what} does not end with a zero byte")
        return data[:-1].decode("utf-8", "replace")

    def skip(self, count: int, what: str) -> None:
        self.file.check(self.position, count, what)
        self.position += count


def _variable(reader: _Reader, model: CTranslate2Model, seen: set[str]) -> None:
    name = reader.text("a variable's name")
    if name in seen:
        raise bad(model.path, f"the variable {name!r} comes twice")
    seen.add(name)
    rank = reader.u8(f"the rank of {name!r}")
    if rank > MOST_DIMENSIONS:
        raise bad(model.path, f"variable {name!r} has {rank} dimensions, the limit is {MOST_DIMENSIONS}")
    shape = tuple(reader.u32(f"the shape of {name!r}") for _ in range(rank))
    number = reader.u8(f"the type of {name!r}")
    size = reader.u32(f"the bytes of {name!r}")
    if number not in TYPES:
        raise bad(model.path, f"variable {name!r} has the unknown type {number}")
    kind, width = TYPES[number]
    values = 1
    for length in shape:
        values *= length
    if values * width != size:
        raise bad(model.path, f"variable {name!r} of shape {list(shape)} takes {values * width} bytes, it has {size}")
    reader.skip(size, f"variable {name!r}")
    model.parameters += values
    model.weight_bytes += size
    model.bytes_by_type[kind] = model.bytes_by_type.get(kind, 0) + size
    if name in _WIDTH_HINTS:
        model.shapes[name] = shape


def _aliases(reader: _Reader, seen: set[str]) -> None:
    count = reader.u32("the number of aliases")
    if count > MOST_VARIABLES:
        raise bad(reader.file.path, f"claims {count} aliases, the limit is {MOST_VARIABLES}")
    for _ in range(count):
        alias, name = reader.text("an alias"), reader.text("the variable of an alias")
        if name not in seen:
            raise bad(reader.file.path, f"the alias {alias!r} stands for {name!r}, which does not exist")
