"""One shard: a safetensors file whose size is known before a byte is written, and which proves its own content.

Its metadata says what it was made of and the digest of all tensor bytes, so that a resumed run tells without any other
record which shards are done. Tensors begin at multiples of 64 bytes, large ones at pages; the format allows no holes,
so that the gaps are tensors themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagein.catalog.safetensors import BITS, FILLER
from pagein.kv.snapshots.snapshot import draft_of, sync_folder

PAGE = 4096
ALIGNED = 64
LARGE = 1024**2
"""Bytes from which on a tensor begins at a page: what that wastes is under 0.4 %."""
DIGEST_KEY = "pagein_data_sha256"
_CHUNK = 8 * 1024**2


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of a shard before it is made."""

    name: str
    dtype: str
    """As safetensors names it."""
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        count = 1
        for side in self.shape:
            count *= side
        return count * BITS[self.dtype] // 8


@dataclass(frozen=True)
class ShardPlan:
    """What one shard will hold; sizes and header follow from it exactly."""

    file: str
    specs: tuple[Spec, ...]
    notes: Mapping[str, str] = field(default_factory=dict)
    """Metadata that tells this shard from one made of other weights or in another way."""

    def laid_out(self) -> list[Spec]:
        """Return the tensors in the order of the file, gaps filled: large ones first, which costs fewer gaps."""
        order = sorted(self.specs, key=lambda spec: spec.nbytes < LARGE)
        laid: list[Spec] = []
        end = 0
        for spec in order:
            gap = -end % (PAGE if spec.nbytes >= LARGE else ALIGNED)
            if gap:
                laid.append(Spec(f"{FILLER}{self.file}.{len(laid)}", "U8", (gap,)))
            laid.append(spec)
            end += gap + spec.nbytes
        return laid

    def header(self, digest: str) -> bytes:
        """Return the bytes before the tensors, a whole number of pages; ``digest`` is 64 hex digits."""
        body: dict[str, object] = {"__metadata__": {"format": "pt", **self.notes, DIGEST_KEY: digest}}
        end = 0
        for spec in self.laid_out():
            place = [end, end + spec.nbytes]
            body[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": place}
            end = place[1]
        text = json.dumps(body, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        return len(text).to_bytes(8, "little") + text

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.header("0" * 64)) + sum(spec.nbytes for spec in self.laid_out())


def write_shard(folder: Path, plan: ShardPlan, produce: Callable[[Spec], Iterable[bytes | memoryview]]) -> str:
    """Write a shard, whole or not at all, and return the digest of its tensor bytes; on return it is on the disk.

    ``produce`` yields the bytes of one tensor. ValueError where they are not as many as planned.
    """
    path = folder / plan.file
    draft = draft_of(path)
    hashed = hashlib.sha256()
    try:
        with open(draft, "wb") as file:
            file.write(plan.header("0" * 64))
            for spec in plan.laid_out():
                written = 0
                for chunk in [bytes(spec.nbytes)] if spec.name.startswith(FILLER) else produce(spec):
                    hashed.update(chunk)
                    written += file.write(chunk)
                if written != spec.nbytes:
                    raise ValueError(f"tensor {spec.name!r} came out as {written} bytes, {spec.nbytes} were planned")
            file.seek(0)
            file.write(plan.header(hashed.hexdigest()))
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.rename(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(folder)
    return hashed.hexdigest()


def claims(folder: Path, plan: ShardPlan) -> bool:
    """Tell whether a shard is there by its size and header alone; `finished` proves it."""
    path = folder / plan.file
    try:
        with open(path, "rb") as file:
            header = file.read(len(plan.header("0" * 64)))
        digest = json.loads(header[8:])["__metadata__"][DIGEST_KEY]
        return bool(path.stat().st_size == plan.nbytes and header == plan.header(digest))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def finished(folder: Path, plan: ShardPlan) -> str | None:
    """Return the digest of a shard that is there already, every byte as planned and as written; None otherwise."""
    path = folder / plan.file
    try:
        if path.is_symlink() or path.stat().st_size != plan.nbytes:
            return None
        found, digest = data_digest(path)
    except (OSError, ValueError):
        return None
    return digest if found == plan.header(digest) else None


def data_digest(path: Path) -> tuple[bytes, str]:
    """Return the header of a shard and the digest of all bytes behind it; reads the whole file. OSError, ValueError."""
    hashed = hashlib.sha256()
    with open(path, "rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > os.fstat(file.fileno()).st_size - 8:
            raise ValueError(f"{path} is no safetensors file")
        header = start + file.read(length)
        for chunk in _chunks(file.fileno(), 8 + length):
            hashed.update(chunk)
    return header, hashed.hexdigest()


def _chunks(descriptor: int, offset: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(_CHUNK))
    while count := os.preadv(descriptor, [buffer], offset):
        yield buffer[:count]
        if hasattr(os, "posix_fadvise"):  # hashing 40 GB must not push everything else out of the page cache
            os.posix_fadvise(descriptor, offset, count, os.POSIX_FADV_DONTNEED)
        offset += count
