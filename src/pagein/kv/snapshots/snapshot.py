"""The container of one snapshot: written whole or not at all, and verified before a byte of its payload is used.

    magic 8 · version u32 · header length u32 · header (JSON) · sha256 of all before
    token ids, u32 each
    payload
    digest of the payload (`treehash`) · sha256 of the header's digest and the payload's

All numbers are little-endian; the file's length follows from its header and must be exactly that. No field is trusted
with an allocation before it is checked. Everything here blocks on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from pagein.errors import SnapshotDamaged
from pagein.kv.snapshots.header import Header, digest_tokens
from pagein.kv.snapshots.treehash import BLOCK, TreeHash, in_blocks

MAGIC = b"PAGEINKV"
VERSION = 1
DRAFT = ".draft"
"""What the name of a file that is being written ends with, after a dot in front."""
PREAMBLE = struct.Struct("<8sII")
DIGEST = 32
ID_BYTES = 12
_AROUND = PREAMBLE.size + 3 * DIGEST


def container_bytes(header: Header) -> int:
    """The exact size of the file that `write_snapshot` makes of this header."""
    return _AROUND + len(header.encode()) + 4 * header.tokens + header.payload_bytes


def snapshot_id(header: Header) -> str:
    """The name of the snapshot with this header, 24 hex digits."""
    return header_digest(header.encode())[:ID_BYTES].hex()


def write_snapshot(path: Path, header: Header, packed_tokens: bytes, payload: Path | Iterable[bytes]) -> None:
    """Write a snapshot, readable by its owner only; on return it is on disk, folder entry and all.

    Raises SnapshotDamaged where the payload is not as long as declared, OSError as the system says; then nothing of it
    is left. Names are unique (`snapshot_id`), so nothing stands in its place before.
    """
    assert len(packed_tokens) == 4 * header.tokens
    assert digest_tokens(packed_tokens) == header.tokens_digest
    draft = draft_of(path)
    try:
        with create_private(draft) as file:
            _write(file, header, packed_tokens, _read_file(payload) if isinstance(payload, Path) else payload)
            file.flush()
            os.fsync(file.fileno())
        os.rename(draft, path)
        draft = path
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise


def draft_of(path: Path) -> Path:
    """The name that a file has while it is written."""
    return path.with_name(f".{path.name}{DRAFT}")


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def create_private(path: Path) -> BinaryIO:
    """A new file for its owner only; an old draft of the name, link or not, makes way."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "wb")


def _write(file: BinaryIO, header: Header, packed_tokens: bytes, payload: Iterable[bytes]) -> None:
    data = header.encode()
    first = header_digest(data)
    file.write(PREAMBLE.pack(MAGIC, VERSION, len(data)) + data + first)
    file.write(packed_tokens)
    written = 0
    with TreeHash(threads=1) as tree:  # saving may take its time; the other cores are the engines'
        for block in in_blocks(payload):
            written += len(block)
            if written > header.payload_bytes:
                break
            tree.update(block)
            file.write(block)
        second = tree.digest()
    if written != header.payload_bytes:
        more = "more than " if written > header.payload_bytes else ""
        raise SnapshotDamaged(
            f"the payload has {more}{min(written, header.payload_bytes)} bytes, {header.payload_bytes} were declared"
        )
    file.write(second + seal(first, second))


def _read_file(path: Path) -> Iterator[bytes]:
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(BLOCK):
            yield chunk


def header_digest(data: bytes) -> bytes:
    """The digest over all bytes up to the header's end."""
    return hashlib.sha256(PREAMBLE.pack(MAGIC, VERSION, len(data)) + data).digest()


def seal(first: bytes, second: bytes) -> bytes:
    """Ties a header to its payload, so that parts of two snapshots cannot stand together."""
    return hashlib.sha256(first + second).digest()
