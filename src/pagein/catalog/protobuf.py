"""The protobuf wire format, read from a file without a schema: fields are numbers with a varint, a fixed or a range.

Length-delimited fields are given as ranges of the file, so that a gigabyte of raw tensor data costs a seek. The number
of fields that are looked at is bounded for the whole file.
Format: https://protobuf.dev/programming-guides/encoding/.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from pagein.catalog.bounded import BoundedFile, bad

MOST_FIELDS = 2 * 1024**2
"""Fields of one file; a graph of fifty thousand nodes has about half a million."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class Range(NamedTuple):
    """Bytes of the file: from ``start`` up to ``end``."""

    start: int
    end: int

    @property
    def size(self) -> int:
        """Bytes in it."""
        return self.end - self.start


class Field(NamedTuple):
    """One field: exactly one of ``number_value`` and ``range`` is set."""

    number: int
    number_value: int | None
    range: Range | None


class Wire:
    """Reads messages of one file."""

    def __init__(self, file: BoundedFile) -> None:
        self.file = file
        self._left = MOST_FIELDS

    def fields(self, part: Range) -> Iterator[Field]:
        """Yield the fields of a message that fills a range; raises BadModelFile where it does not fill it exactly."""
        position = part.start
        while position < part.end:
            self._left -= 1
            if self._left < 0:
                raise bad(self.file.path, f"has more than {MOST_FIELDS} protobuf fields")
            key, position = self.varint(position, part.end)
            number, kind = key >> 3, key & 7
            if number == 0:
                raise bad(self.file.path, f"has a protobuf field with the number 0 at byte {position}")
            if kind == _VARINT:
                value, position = self.varint(position, part.end)
                yield Field(number, value, None)
            elif kind == _BYTES:
                length, position = self.varint(position, part.end)
                self._inside(position, length, part.end, number)
                yield Field(number, None, Range(position, position + length))
                position += length
            elif kind in (_FIXED32, _FIXED64):
                width = 4 if kind == _FIXED32 else 8
                self._inside(position, width, part.end, number)
                data = self.file.at(position, width, f"field {number}")
                yield Field(number, struct.unpack("<I" if width == 4 else "<Q", data)[0], None)
                position += width
            else:
                raise bad(self.file.path, f"has a protobuf field of the unknown kind {kind} at byte {position}")

    def varint(self, position: int, end: int) -> tuple[int, int]:
        """Return a number of up to ten bytes and the position behind it."""
        data = self.file.at(position, max(min(10, end - position), 0), "a protobuf number")
        value = 0
        for index, byte in enumerate(data):
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value & 0xFFFF_FFFF_FFFF_FFFF, position + index + 1
        raise bad(self.file.path, f"has a protobuf number without end at byte {position}")

    def varints(self, part: Range, most: int, what: str) -> list[int]:
        """Read a packed list of numbers."""
        values: list[int] = []
        position = part.start
        while position < part.end:
            value, position = self.varint(position, part.end)
            values.append(value)
            if len(values) > most:
                raise bad(self.file.path, f"{what} has more than {most} values")
        return values

    def text(self, part: Range, most: int, what: str) -> str:
        """Read a text of at most so many bytes."""
        if part.size > most:
            raise bad(self.file.path, f"{what} has {part.size} bytes, the limit is {most}")
        return self.file.at(part.start, part.size, what).decode("utf-8", "replace")

    def _inside(self, position: int, length: int, end: int, number: int) -> None:
        if position + length > end:
            raise bad(
                self.file.path, f"protobuf field {number} ends at byte {position + length}, its message ends at {end}"
            )
