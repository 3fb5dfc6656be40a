"""GGUF headers, versions 2 and 3: metadata and tensor table, checked before any engine sees the file.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The weights are never read; long arrays (the
vocabulary) are stepped over and only counted.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad
from pagein.catalog.ggml_types import GGML_TYPES

MAGIC = b"GGUF"
MOST_TENSORS = 65_536
MOST_KEYS = 16_384
LONGEST_KEY = 1024
LONGEST_NAME = 128
"""ggml itself keeps 64 bytes of a tensor's name."""
KEPT_STRING = 4096
"""Longer strings (chat templates) are kept up to here."""
KEPT_ARRAY = 4096
"""Numeric arrays with more values (scores of a vocabulary) are counted, not kept."""
MOST_STRINGS = 4 * 1024**2
"""Strings in all arrays together; the largest vocabularies have under a million, merges included."""
LARGEST_HEADER = 512 * 1024**2
"""A vocabulary of a million long tokens takes a tenth of this."""
MOST_DIMENSIONS = 4
LARGEST_ALIGNMENT = 1024**2

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Counted:
    """An array that was stepped over: how many values it has."""

    count: int


Value = int | float | bool | str | list[int | float | bool] | Counted


@dataclass(slots=True)
class GgufHeader:
    """What the header of one GGUF file holds."""

    path: Path
    size: int
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: int = 0
    parameters: int = 0
    weight_bytes: int = 0
    bytes_by_type: dict[str, int] = field(default_factory=dict)
    """Bytes per ggml type, the token embedding apart."""
    token_embedding: tuple[int, int] | None = None
    """Rows (the vocabulary) and bytes of ``token_embd.weight``."""


class _Cursor:
    """Reads forward through the header."""

    def __init__(self, file: BoundedFile) -> None:
        self.file = file
        self.position = 0
        self.strings_left = MOST_STRINGS

    def take(self, count: int, what: str) -> bytes:
        data = self.file.at(self.position, count, what)
        self.move_to(self.position + count, what)
        return data

    def u32(self, what: str) -> int:
        return int(_U32.unpack(self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack(self.take(8, what))[0])

    def skip(self, count: int, what: str) -> None:
        self.file.check(self.position, count, what)
        self.move_to(self.position + count, what)

    def move_to(self, position: int, what: str) -> None:
        if position > LARGEST_HEADER:
            raise bad(self.file.path, f"{what} reaches byte {position}; a header ends before {LARGEST_HEADER}")
        self.position = position

    def text(self, limit: int, what: str) -> str:
        length = self.u64(what)
        if length > limit:
            raise bad(self.file.path, f"{what} has {length} bytes, the limit is {limit}")
        try:
            return self.take(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            raise bad(self.file.path, f"{what} is not UTF-8: {error.reason} at byte {error.start}") from error


def is_gguf(start: bytes) -> bool:
    """Tell a GGUF file by its first bytes."""
    return start[:4] == MAGIC


def read_gguf(path: Path) -> GgufHeader:
    """Read and check the header of one file; raises BadModelFile."""
    with BoundedFile(path) as file:
        cursor = _Cursor(file)
        if cursor.take(4, "the magic") != MAGIC:
            raise bad(path, "does not start with GGUF")
        _check_version(cursor)
        tensors = _count(cursor, "tensors", MOST_TENSORS, 24)
        keys = _count(cursor, "metadata keys", MOST_KEYS, 12)
        header = GgufHeader(path, file.size, tensors=tensors)
        for _ in range(keys):
            key = cursor.text(LONGEST_KEY, "a metadata key")
            if key in header.metadata:
                raise bad(path, f"the metadata key {key!r} comes twice")
            header.metadata[key] = _value(cursor, key)
        places = sorted(_tensors(cursor, header))
        _check_places(cursor, header, places)
        return header


def _check_version(cursor: _Cursor) -> None:
    version = cursor.u32("the version")
    if version in (2, 3):
        return
    if version in (0x02000000, 0x03000000):
        raise bad(cursor.file.path, "is a big-endian GGUF file; only little-endian ones are read")
    raise bad(cursor.file.path, f"has GGUF version {version}; versions 2 and 3 are read")


def _count(cursor: _Cursor, what: str, most: int, least_bytes: int) -> int:
    count = cursor.u64(f"the number of {what}")
    if count > most:
        raise bad(cursor.file.path, f"claims {count} {what}, the limit is {most}")
    cursor.file.check(cursor.position, count * least_bytes, f"the table of {count} {what}")
    return count


def _value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32(f"the type of {key!r}")
    if kind == _STRING:
        return _string(cursor, key)
    if kind == _ARRAY:
        return _array(cursor, key)
    return _scalar(cursor, key, kind)


def _scalar(cursor: _Cursor, key: str, kind: int) -> int | float | bool:
    code = _SCALARS.get(kind)
    if code is None:
        raise bad(cursor.file.path, f"{key!r} has the unknown value type {kind}")
    data = cursor.take(struct.calcsize(f"<{code}"), repr(key))
    value: int | float | bool = struct.unpack(f"<{code}", data)[0]
    return value


def _string(cursor: _Cursor, key: str) -> str:
    length = cursor.u64(f"the length of {key!r}")
    start = cursor.position
    cursor.skip(length, repr(key))
    # Values may hold any bytes (templates, names); only keys must be clean.
    return cursor.file.at(start, min(length, KEPT_STRING), repr(key)).decode("utf-8", "replace")


def _array(cursor: _Cursor, key: str) -> Value:
    kind = cursor.u32(f"the item type of {key!r}")
    count = cursor.u64(f"the length of {key!r}")
    if kind == _STRING:
        _skip_strings(cursor, key, count)
        return Counted(count)
    code = _SCALARS.get(kind)
    if code is None:
        raise bad(cursor.file.path, f"{key!r} is an array of the unknown type {kind}")
    width = struct.calcsize(f"<{code}")
    cursor.file.check(cursor.position, count * width, f"{key!r} with {count} values")
    if count > KEPT_ARRAY:
        cursor.skip(count * width, repr(key))
        return Counted(count)
    return list(struct.unpack(f"<{count}{code}", cursor.take(count * width, repr(key))))


def _skip_strings(cursor: _Cursor, key: str, count: int) -> None:
    cursor.file.check(cursor.position, count * 8, f"{key!r} with {count} strings")
    if count > cursor.strings_left:
        raise bad(cursor.file.path, f"{key!r} has {count} strings, {cursor.strings_left} more are read")
    cursor.strings_left -= count
    at, unpack, position, what = cursor.file.at, _U64.unpack, cursor.position, repr(key)
    for _ in range(count):  # written out: a vocabulary has a quarter of a million of them
        position += 8 + unpack(at(position, 8, what))[0]
        if position > LARGEST_HEADER:
            break
    cursor.file.check(position, 0, what)
    cursor.move_to(position, what)


def _tensors(cursor: _Cursor, header: GgufHeader) -> Iterator[tuple[int, int, str]]:
    """Yield offset (from the start of the data), bytes and name of every tensor, and add them up in the header."""
    seen: set[str] = set()
    for _ in range(header.tensors):
        name = cursor.text(LONGEST_NAME, "a tensor's name")
        if name in seen:
            raise bad(header.path, f"the tensor {name!r} comes twice")
        seen.add(name)
        shape = _shape(cursor, name)
        number = cursor.u32(f"the type of tensor {name!r}")
        offset = cursor.u64(f"the offset of tensor {name!r}")
        block = GGML_TYPES.get(number)
        if block is None:
            raise bad(header.path, f"tensor {name!r} has the unknown type {number}")
        row = shape[0] if shape else 1
        if row % block.values:
            raise bad(header.path, f"tensor {name!r} has rows of {row} values, {block.name} packs {block.values}")
        values = _product(cursor, name, shape)
        size = values // block.values * block.bytes
        _add(header, name, shape, block.name, values, size)
        yield offset, size, name


def _shape(cursor: _Cursor, name: str) -> list[int]:
    dimensions = cursor.u32(f"the dimensions of tensor {name!r}")
    if dimensions > MOST_DIMENSIONS:
        raise bad(cursor.file.path, f"tensor {name!r} has {dimensions} dimensions, the limit is {MOST_DIMENSIONS}")
    return [cursor.u64(f"the shape of tensor {name!r}") for _ in range(dimensions)]


def _product(cursor: _Cursor, name: str, shape: list[int]) -> int:
    values = 1
    for length in shape:
        values *= length
        if values >= 2**63 or length >= 2**63:
            raise bad(cursor.file.path, f"tensor {name!r} of shape {shape} has more values than 64 bits can count")
    return values


def _add(header: GgufHeader, name: str, shape: list[int], kind: str, values: int, size: int) -> None:
    header.parameters += values
    header.weight_bytes += size
    if name == "token_embd.weight" and len(shape) == 2:
        header.token_embedding = (shape[1], size)
    else:
        header.bytes_by_type[kind] = header.bytes_by_type.get(kind, 0) + size


def _check_places(cursor: _Cursor, header: GgufHeader, places: list[tuple[int, int, str]]) -> None:
    """Every tensor lies aligned inside the file and over no other."""
    alignment = header.metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 0 < alignment <= LARGEST_ALIGNMENT or alignment & (alignment - 1):
        raise bad(header.path, f"has the alignment {alignment!r}, not a power of two up to {LARGEST_ALIGNMENT}")
    start = -(-cursor.position // alignment) * alignment
    end, before = 0, ""
    for offset, size, name in places:
        if offset % alignment:
            raise bad(header.path, f"tensor {name!r} starts at {offset}, not a multiple of {alignment}")
        if offset < end:
            raise bad(header.path, f"tensor {name!r} starts at {offset}, but {before!r} ends at {end}")
        cursor.file.check(start + offset, size, f"tensor {name!r}")
        if size:
            end, before = offset + size, name
