"""Reading a file that nobody vouches for: every read is bounded, every fault is a BadModelFile with both numbers.

All header readers of the catalog stand on these few lines, so that no length field of a hostile file is ever trusted
with an allocation.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

from pagein.errors import BadModelFile

BLOCK = 256 * 1024
"""Bytes read ahead at once where a file is read on; small fields are served from this block."""
FIRST_BLOCK = 4096
"""Bytes read ahead after a jump: a table that points all over a large file must not cost a read of the file."""
LARGEST_READ = 128 * 1024**2
"""No single read is larger, whatever a file asks for."""


def bad(path: Path, what: str, *, hint: str | None = None, **details: object) -> BadModelFile:
    """Build the error for a fault in a file."""
    return BadModelFile(f"{path}: {what}", hint=hint, path=str(path), **details)


class BoundedFile:
    """A regular file, opened for reading at any offset and never past its end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # O_NONBLOCK: a named pipe in place of a model must not block the daemon.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise bad(path, f"cannot be opened: {reason}") from error
        status = os.fstat(self._descriptor)
        if not stat.S_ISREG(status.st_mode):
            os.close(self._descriptor)
            raise bad(path, "is not a regular file")
        self.size = status.st_size
        self._block = b""
        self._block_at = 0

    def __enter__(self) -> BoundedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._descriptor)

    def at(self, offset: int, count: int, what: str) -> bytes:
        """Return exactly ``count`` bytes; raises BadModelFile where the file has fewer."""
        self.check(offset, count, what)
        if count > LARGEST_READ:
            raise bad(self.path, f"{what} has {count} bytes, more than the {LARGEST_READ} that are read at once")
        start = offset - self._block_at
        if start < 0 or start + count > len(self._block):
            goes_on = 0 <= start <= len(self._block)
            ahead = min(BLOCK if goes_on else FIRST_BLOCK, self.size - offset)
            self._block = self._read(offset, max(count, ahead), what)
            self._block_at = offset
            start = 0
        return self._block[start : start + count]

    def check(self, offset: int, count: int, what: str) -> None:
        """Raise BadModelFile unless ``count`` bytes from ``offset`` lie inside the file."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise bad(
                self.path,
                f"{what} ends at byte {offset + count}, the file has {self.size}",
                offset=offset,
                bytes=count,
                file_bytes=self.size,
            )

    def _read(self, offset: int, count: int, what: str) -> bytes:
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._descriptor, count, offset)
            except OSError as error:
                raise bad(self.path, f"{what} cannot be read at byte {offset}: {error.strerror}") from error
            if not part:
                raise bad(self.path, f"{what} ends at byte {offset}: the file was shortened while it was read")
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


def read_json(path: Path, limit: int, *, most_items: int = 100_000) -> dict[str, object]:
    """Read a small JSON object strictly: bounded size, bounded number of items, no key twice."""
    with BoundedFile(path) as file:
        if file.size > limit:
            raise bad(path, f"has {file.size} bytes, the limit is {limit}")
        data = file.at(0, file.size, "the JSON text")
    # Counted before parsing: a megabyte of brackets would become a hundred megabytes of empty lists.
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > most_items:
        raise bad(path, f"has {items} items, the limit is {most_items}")
    return parse_object(path, data)


def parse_object(path: Path, data: bytes) -> dict[str, object]:
    """Parse a JSON object of a file; a key that comes twice, a nesting without end or no object is a BadModelFile."""
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
    except (ValueError, RecursionError) as error:
        raise bad(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad(path, f"holds a JSON {type(value).__name__}, not an object")
    return value


def no_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Make an object of JSON, for `object_pairs_hook`; ValueError for a key that comes twice."""
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key[:80]!r} comes twice")
        result[key] = value
    return result
