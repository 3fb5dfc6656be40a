"""Reading a snapshot that nobody vouches for: verified at opening, and the payload before its use."""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from pagein.errors import SnapshotDamaged
from pagein.kv.snapshots.header import LARGEST_HEADER, Header, digest_tokens, unpack_tokens
from pagein.kv.snapshots.snapshot import (
    DIGEST,
    ID_BYTES,
    MAGIC,
    PREAMBLE,
    VERSION,
    create_private,
    draft_of,
    header_digest,
)
from pagein.kv.snapshots.snapshot import seal as seal_of
from pagein.kv.snapshots.treehash import BLOCK, TreeHash


class SnapshotReader:
    """A snapshot that is open. Opening verifies all but the payload; no byte of that comes out before it is verified.

    Every fault of the file is a SnapshotDamaged with the part's name; one that cannot be opened is an OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = _open(path)
        self._verified = False
        try:
            self.bytes = os.fstat(self._descriptor).st_size
            """The size of the whole file."""
            self.header, first, length = self._read_header()
            self.id = first[:ID_BYTES].hex()
            """The name that it was written under, see `snapshot_id`."""
            self._tokens_at = PREAMBLE.size + length + DIGEST
            self._payload_at = self._tokens_at + 4 * self.header.tokens
            expected = self._payload_at + self.header.payload_bytes + 2 * DIGEST
            if self.bytes != expected:
                raise self._damaged(f"the file has {self.bytes} bytes, its header says {expected}")
            self.packed_tokens = self._read_tokens()
            self._payload_digest = self._read_trailer(first)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SnapshotReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    @property
    def tokens(self) -> list[int]:
        """The token ids."""
        return unpack_tokens(self.packed_tokens)

    def verify(self) -> None:
        """Read the payload and compare its digest; raises SnapshotDamaged."""
        for _ in self._blocks_then_check():
            pass

    def chunks(self) -> Iterator[bytes]:
        """The payload in blocks, verified before the first one comes: it is read twice."""
        if not self._verified:
            self.verify()
        return self._blocks()

    def copy_payload(self, target: Path) -> None:
        """Write the payload to a file of its own, for an engine that reads files: there whole and verified, or not.

        The copy is a scratch file: readable by its owner only, and not forced to disk. Raises OSError where it cannot
        be written.
        """
        draft = draft_of(target)
        try:
            with create_private(draft) as file:
                for block in self._blocks_then_check():
                    file.write(block)
            os.replace(draft, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise

    def _read_header(self) -> tuple[Header, bytes, int]:
        magic, version, length = PREAMBLE.unpack(self._at(0, PREAMBLE.size, "preamble"))
        if magic != MAGIC:
            raise self._damaged(f"begins with {magic!r}, not with {MAGIC!r}")
        if version != VERSION:
            raise self._damaged(f"has format version {version}, this program reads {VERSION}")
        if length > LARGEST_HEADER:
            raise self._damaged(f"the header has {length} bytes, the limit is {LARGEST_HEADER}")
        data = self._at(PREAMBLE.size, length, "header")
        digest = self._at(PREAMBLE.size + length, DIGEST, "header's digest")
        if not hmac.compare_digest(digest, header_digest(data)):
            raise self._damaged("the header's digest is not that of the header")
        try:
            header = Header.decode(data)
            if header.encode() != data:
                raise ValueError("the header is not in its canonical form")
        except ValueError as error:
            raise self._damaged(str(error)) from error
        return header, digest, length

    def _read_tokens(self) -> bytes:
        packed = self._at(self._tokens_at, 4 * self.header.tokens, "token ids")
        if digest_tokens(packed) != self.header.tokens_digest:
            raise self._damaged("the token ids' digest is not that of the token ids")
        return packed

    def _read_trailer(self, first: bytes) -> bytes:
        trailer = self._at(self.bytes - 2 * DIGEST, 2 * DIGEST, "trailer")
        second, seal = trailer[:DIGEST], trailer[DIGEST:]
        if seal != seal_of(first, second):
            raise self._damaged("the seal is not that of this header and this payload")
        return second

    def _blocks(self) -> Iterator[bytes]:
        end = self._payload_at + self.header.payload_bytes
        for start in range(self._payload_at, end, BLOCK):
            yield self._at(start, min(BLOCK, end - start), "payload")

    def _blocks_then_check(self) -> Iterator[bytes]:
        """The payload, still unproven; raises SnapshotDamaged after the last block where its digest is another."""
        with TreeHash() as tree:
            for block in self._blocks():
                tree.update(block)
                yield block
            if tree.digest() != self._payload_digest:
                raise self._damaged("the payload's digest is not that of the payload")
        self._verified = True

    def _at(self, offset: int, count: int, what: str) -> bytes:
        """Exactly ``count`` bytes at an offset; a count is only asked for after it was checked."""
        if offset + count > self.bytes:
            raise self._damaged(f"the {what} ends at byte {offset + count}, the file has {self.bytes}")
        parts: list[bytes] = []
        while count > 0:
            try:
                part = os.pread(self._descriptor, count, offset)
            except OSError as error:
                raise self._damaged(f"the {what} cannot be read at byte {offset}: {error.strerror}") from error
            if not part:
                raise self._damaged(f"the {what} ends at byte {offset}: the file was shortened while it was read")
            parts.append(part)
            offset += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _damaged(self, what: str) -> SnapshotDamaged:
        return SnapshotDamaged(f"{self.path.name}: {what}", path=str(self.path))


def _open(path: Path) -> int:
    """Open a regular file that is no link; a pipe in its place must not block.

    What says nothing about the file (too many are open, no right) stays the OSError that it is: nothing is damaged.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise SnapshotDamaged(f"{path.name}: is a link or a socket", path=str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise SnapshotDamaged(f"{path.name}: is not a regular file", path=str(path))
    return descriptor
