"""The identity of weight files: what remembered peaks hang on.

The digest is sha256 over the files in the order of their names: of each its size, its first and last MiB, and 64
chunks of 64 KiB spread evenly between them. That takes milliseconds where hashing 40 GB takes minutes, and tells
quantisations, fine-tunes and half-finished downloads apart. It is an identity for remembered sizes, not proof of
integrity: bytes between the chunks are not looked at.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pagein.catalog.bounded import BoundedFile, bad

ENDS = 1024**2
"""Bytes hashed at the start and at the end of a file."""
CHUNK = 64 * 1024
CHUNKS = 64


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells that a file is still the one that was hashed."""

    path: str
    size: int
    mtime_ns: int
    inode: int


class DigestCache(Protocol):
    """Remembers digests across starts; see `PeakStore`."""

    def cached_digest(self, stamp: Stamp) -> str | None:
        """Return the digest of a file that has not changed since it was hashed, or None."""
        ...

    def remember_digest(self, stamp: Stamp, digest: str) -> None:
        """Keep a digest; never raises."""
        ...


def digest(files: Iterable[Path], cache: DigestCache | None = None) -> str:
    """Return the identity of a model's files (64 hex digits), hashing only those that the cache does not know.

    Raises BadModelFile for a file that cannot be read.
    """
    whole = hashlib.sha256()
    for path in sorted(files, key=lambda file: file.name):
        whole.update(_digest_file(path, cache).encode())
    return whole.hexdigest()


def _digest_file(path: Path, cache: DigestCache | None) -> str:
    stamp = _stamp(path)
    known = cache.cached_digest(stamp) if cache is not None else None
    if known is not None:
        return known
    with BoundedFile(path) as file:
        hashed = hashlib.sha256(str(file.size).encode())
        for start, length in _samples(file.size):
            hashed.update(file.at(start, length, "a sample of the weights"))
    if cache is not None:
        cache.remember_digest(stamp, hashed.hexdigest())
    return hashed.hexdigest()


def _samples(size: int) -> Iterator[tuple[int, int]]:
    """Start and length of what is hashed of a file of this size; the whole of a small one."""
    if size <= 2 * ENDS + CHUNKS * CHUNK:
        for start in range(0, size, ENDS):
            yield start, min(ENDS, size - start)
        return
    yield 0, ENDS
    middle = size - 2 * ENDS - CHUNK
    for chunk in range(CHUNKS):
        yield ENDS + middle * chunk // (CHUNKS - 1), CHUNK
    yield size - ENDS, ENDS


def _stamp(path: Path) -> Stamp:
    try:
        status = os.stat(path)
    except OSError as error:
        raise bad(path, f"cannot be read: {error.strerror}") from error
    return Stamp(str(path), status.st_size, status.st_mtime_ns, status.st_ino)
