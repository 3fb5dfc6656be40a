"""Safetensors headers: one file, a folder with an index, a folder without one.

Format: https://huggingface.co/docs/safetensors (8 bytes of length, a JSON header, then the tensors without holes).
The header is scanned with a grammar of its own instead of a general JSON parser: what does not look like a tensor is
refused on the spot, so memory grows with the number of tensors only, and no key can come twice unseen.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.bounded import BoundedFile, bad, read_json
from pagein.catalog.folder import inside

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""
MOST_TENSORS = 262_144
MOST_DIMENSIONS = 16
INDEX_LIMIT = 32 * 1024**2
INDEX_NAME = "model.safetensors.index.json"

BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "F64": 64, "I64": 64, "U64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
"""Bits per value of each dtype of the format."""
FILLER = "pagein.filler."
"""What the names of tensors begin with that only fill a gap in files that Pagein writes; the format allows no holes."""

_SPACE = re.compile(rb"[ \t\r\n]*")
_STRING = re.compile(rb'"((?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u[0-9a-fA-F]{4})*)"')
_WHOLE = re.compile(rb"0|[1-9][0-9]{0,18}")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor rests: absolute byte in its file, bytes, dtype by the format's name, shape."""

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class TensorTable:
    """What the header of one safetensors file holds."""

    path: Path
    size: int
    data_at: int = 0
    """The byte of the file where the tensors begin."""
    names: set[str] = field(default_factory=set)
    tensors: list[StoredTensor] | None = None
    """Every tensor's place, for who asks: the catalog of many models does not need them."""
    parameters: int = 0
    weight_bytes: int = 0
    bytes_by_type: dict[str, int] = field(default_factory=dict)


class _Scanner:
    """Steps through the header's text; every refusal names the byte."""

    def __init__(self, path: Path, text: bytes) -> None:
        self.path = path
        self.text = text
        self.position = 0

    def fail(self, wanted: str) -> Exception:
        return bad(self.path, f"the header has no {wanted} at byte {8 + self.position}")

    def peek(self) -> bytes:
        match = _SPACE.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty text
        self.position = match.end()
        return self.text[self.position : self.position + 1]

    def expect(self, sign: bytes) -> None:
        if self.peek() != sign:
            raise self.fail(repr(sign.decode()))
        self.position += 1

    def string(self) -> str:
        self.peek()
        match = _STRING.match(self.text, self.position)
        if match is None:
            raise self.fail("text in quotes")
        try:
            value: str = json.loads(match.group())
        except ValueError as error:
            raise self.fail("valid UTF-8 text") from error
        self.position = match.end()
        return value

    def whole(self) -> int:
        self.peek()
        match = _WHOLE.match(self.text, self.position)
        if match is None:
            raise self.fail("whole number")
        self.position = match.end()
        return int(match.group())

    def members(self) -> Iterator[str]:
        """Yield the keys of an object; the caller reads each value before it asks for the next key."""
        self.expect(b"{")
        if self.peek() == b"}":
            self.position += 1
            return
        while True:
            yield self.string_key()
            if self.peek() == b"}":
                self.position += 1
                return
            self.expect(b",")

    def string_key(self) -> str:
        key = self.string()
        self.expect(b":")
        return key

    def wholes(self, most: int, what: str) -> list[int]:
        self.expect(b"[")
        values: list[int] = []
        if self.peek() == b"]":
            self.position += 1
            return values
        while True:
            values.append(self.whole())
            if len(values) > most:
                raise bad(self.path, f"{what} has more than {most} values")
            if self.peek() == b"]":
                self.position += 1
                return values
            self.expect(b",")


def is_safetensors(start: bytes) -> bool:
    """Tell a safetensors file by its first bytes: a length within the limit, then a JSON object."""
    return len(start) >= 9 and 2 <= struct.unpack_from("<Q", start)[0] <= LONGEST_HEADER and start[8:9] == b"{"


def read_safetensors(path: Path, *, places: bool = False) -> TensorTable:
    """Read and check the header of one file, with each tensor's place where asked; raises BadModelFile."""
    with BoundedFile(path) as file:
        length = header_length(path, file.at(0, 8, "the header's length"))
        return parse_header(path, file.at(8, length, "the header"), file.size, places=places)


def header_length(path: Path, start: bytes, limit: int = LONGEST_HEADER) -> int:
    """Return the bytes of the header that the first 8 bytes of a file announce; raises BadModelFile past the limit."""
    length: int = struct.unpack("<Q", start)[0]
    if length > limit:
        raise bad(path, f"has a header of {length} bytes, the limit is {limit}")
    return length


def parse_header(path: Path, text: bytes, size: int, *, places: bool = False) -> TensorTable:
    """Check the header of a file of ``size`` bytes that was read already; raises BadModelFile. Opens nothing."""
    scanner = _Scanner(path, text)
    table = TensorTable(path, size, 8 + len(text), tensors=[] if places else None)
    _check_places(table, sorted(_entries(scanner, table)), size - 8 - len(text))
    return table


def _entries(scanner: _Scanner, table: TensorTable) -> Iterator[tuple[int, int, str]]:
    """Yield begin, end and name of every tensor."""
    notes = False
    for name in scanner.members():
        if name == "__metadata__":
            if notes:
                raise bad(table.path, "the key '__metadata__' comes twice")
            notes = True
            _skip_notes(scanner)
            continue
        if name in table.names:
            raise bad(table.path, f"the tensor {name!r} comes twice")
        if len(table.names) == MOST_TENSORS:
            raise bad(table.path, f"has more than {MOST_TENSORS} tensors")
        table.names.add(name)
        yield _entry(scanner, table, name)
    if scanner.text[scanner.position :].strip(b" \t\r\n"):
        raise scanner.fail("end")


def _skip_notes(scanner: _Scanner) -> None:
    seen: set[str] = set()
    for key in scanner.members():
        if key in seen:
            raise bad(scanner.path, f"the metadata key {key[:80]!r} comes twice")
        seen.add(key)
        scanner.string()


def _entry(scanner: _Scanner, table: TensorTable, name: str) -> tuple[int, int, str]:
    dtype: str | None = None
    shape: list[int] | None = None
    place: list[int] | None = None
    for key in scanner.members():
        if key == "dtype" and dtype is None:
            dtype = scanner.string()
        elif key == "shape" and shape is None:
            shape = scanner.wholes(MOST_DIMENSIONS, f"the shape of {name!r}")
        elif key == "data_offsets" and place is None:
            place = scanner.wholes(2, f"data_offsets of {name!r}")
        else:
            raise bad(table.path, f"tensor {name!r} has the unexpected or repeated key {key[:80]!r}")
    if dtype is None or shape is None or place is None or len(place) != 2:
        raise bad(table.path, f"tensor {name!r} lacks dtype, shape or two data_offsets")
    values = _check_size(table, name, dtype, shape, place)
    size = place[1] - place[0]
    table.parameters += values
    table.weight_bytes += size
    table.bytes_by_type[dtype] = table.bytes_by_type.get(dtype, 0) + size
    if table.tensors is not None:
        table.tensors.append(StoredTensor(name, table.path, table.data_at + place[0], size, dtype, tuple(shape)))
    return place[0], place[1], name


def _check_size(table: TensorTable, name: str, dtype: str, shape: list[int], place: list[int]) -> int:
    """Return the number of values; raise where shape times dtype is not what the offsets span."""
    bits = BITS.get(dtype)
    if bits is None:
        raise bad(table.path, f"tensor {name!r} has the unknown dtype {dtype[:40]!r}")
    values = 1
    for length in shape:
        values *= length
        if values >= 2**63:
            raise bad(table.path, f"tensor {name!r} of shape {shape} has more values than 64 bits can count")
    if values * bits % 8:
        raise bad(table.path, f"tensor {name!r} of {values} {dtype} values does not fill whole bytes")
    if values * bits // 8 != place[1] - place[0]:
        raise bad(
            table.path,
            f"tensor {name!r} of shape {shape} and dtype {dtype} takes {values * bits // 8} bytes, "
            f"its offsets span {place[1] - place[0]}",
        )
    return values


def _check_places(table: TensorTable, places: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Tensors follow each other without hole or overlap and end with the file."""
    end = 0
    for begin, stop, name in places:
        if begin != end:
            raise bad(table.path, f"tensor {name!r} begins at byte {begin} of the data, expected {end}")
        end = stop
    if end != data_bytes:
        raise bad(table.path, f"the tensors end at byte {end} of the data, the file has {data_bytes}")


def read_sharded(folder: Path, shards: list[Path], *, indexed: bool, places: bool = False) -> list[TensorTable]:
    """Read shards: those that the folder's index names where there is one and it counts, else the given; none twice."""
    index = folder / INDEX_NAME
    placed = _read_index(folder, index) if indexed and index.exists() else None
    if placed is not None:
        shards = [inside(folder, name) for name in sorted(set(placed.values()))]
    tables = [read_safetensors(shard, places=places) for shard in shards]
    owner: dict[str, str] = {}
    for table, shard in zip(tables, shards, strict=True):
        for name in table.names:
            if name in owner:
                raise bad(shard, f"the tensor {name!r} is also in {owner[name]}")
            owner[name] = shard.name
    if placed is not None:
        _check_index(index, placed, {path.name: table for path, table in zip(shards, tables, strict=True)})
    return tables


def _read_index(folder: Path, index: Path) -> dict[str, str]:
    body = read_json(inside(folder, index.name), INDEX_LIMIT, most_items=2 * MOST_TENSORS)
    weights = body.get("weight_map")
    if not isinstance(weights, dict) or not weights:
        raise bad(index, "has no weight_map")
    placed: dict[str, str] = {}
    for tensor, name in weights.items():
        if not isinstance(name, str):
            raise bad(index, f"weight_map gives no file for the tensor {tensor!r}")
        placed[tensor] = name
    return placed


def _check_index(index: Path, placed: dict[str, str], tables: dict[str, TensorTable]) -> None:
    for tensor, name in placed.items():
        if tensor not in tables[name].names:
            raise bad(index, f"the tensor {tensor!r} should be in {name}, which does not have it")
