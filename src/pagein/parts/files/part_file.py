"""The one way to open and read a part. In this order, each refusal before the next step costs anything:

1. the task is one of the plan's, the part one of that task's: a request names nothing else
2. file name, size, digest and tensors come from the plan
3. opened under the root's descriptor: no link, a regular file, one name, a trusted owner, the plan's size
4. its bytes are reserved
5. read, within a time, into one private buffer
6. the digest of that very buffer is the plan's
7. the header, read from the buffer by a strict grammar, says what the plan says

Pickles (``.bin``, ``.pt``) have no way in, under any name. There is no other loader to fall back to.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import close, stat_result
from pathlib import Path
from types import MappingProxyType

from pagein.catalog.safetensors import FILLER, StoredTensor, header_length, parse_header
from pagein.catalog.split.plan import Part, PartFile, Role, SplitPlan
from pagein.catalog.split.root import PartsRoot
from pagein.errors import BadModelFile, PageinError, PartRefused
from pagein.memory.buffers import Buffer
from pagein.parts.files.audit import Audit, AuditLine, no_audit
from pagein.parts.files.proven import Proven, stamp_of
from pagein.parts.files.reading import Hash, Read, Reading, read_from_file
from pagein.weights.packed.shard_file import PAGE

Reserve = Callable[[int], Callable[[], None]]
"""Takes bytes out of the allowance and returns what gives them back; raises PageinError where they are not there."""
_NOTES = 64 * 1024
"""Bytes that a header may have beside what its tensors take: metadata, and spaces up to a page."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a part may cost at most."""

    nbytes: int = 2 * 1024**3
    """Of a file. The backbone's is bounded by the allowance alone: it is as large as models are."""
    seconds_per_100mb: float = 3.0
    """For each 100 MB or less of it."""

    def seconds(self, nbytes: int) -> float:
        """Return how long reading may take."""
        return self.seconds_per_100mb * max(1.0, nbytes / 100e6)


@dataclass(frozen=True, slots=True)
class Placed:
    """Where in the buffer a tensor lies."""

    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(slots=True)
class PartBytes:
    """A part's file in memory, proven; its bytes are the allowance's until `close`."""

    part: str
    precision: str
    entry: PartFile
    buffer: Buffer
    tensors: Mapping[str, Placed]
    who: str
    task: str | None
    seconds: float
    """What it took to read and prove."""
    by_fast_digest: bool
    """Proven by the digest of an earlier, full proof of the same unchanged file."""
    _give_back: Callable[[], None]
    _closed: bool = field(default=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.entry.nbytes

    def view(self, tensor: str) -> memoryview:
        """The bytes of one tensor; not after `close`."""
        place = self.tensors[tensor]
        return self.buffer.view[place.offset : place.offset + place.nbytes]

    def line(self, result: str, reason: str | None = None) -> AuditLine:
        """Return the audit line of this load, for who publishes it."""
        entry, ms = self.entry, round(self.seconds * 1000, 3)
        return AuditLine(
            self.who, self.task, self.part, self.precision, result, entry.file, entry.sha256, self.nbytes, ms, reason
        )

    def close(self) -> None:
        """Give memory and reservation back, once; nothing may compute from the tensors any more."""
        if not self._closed:
            self._closed = True
            self.buffer.close()
            self._give_back()


@dataclass(slots=True)
class _Attempt:
    """What the audit line of one reading will say."""

    who: str
    task: str | None
    part: str
    precision: str
    began: float
    file: str | None = None
    digest: str | None = None
    nbytes: int = 0


class PartReader:
    """Reads parts of one split model; any thread may call it, and each call is its own."""

    def __init__(
        self,
        root: PartsRoot,
        plan: SplitPlan,
        *,
        limits: Limits | None = None,
        audit: Audit = no_audit,
        proven: Proven | None = None,
        clock: Callable[[], float] = time.monotonic,
        read: Read = read_from_file,
    ) -> None:
        """``proven`` remembers full proofs, so that reading an unchanged file again costs less; None: always full."""
        self.plan = plan
        self.bytes_read = 0
        """By all readings so far: a sign of life of one that takes long."""
        self._counting = threading.Lock()
        self._root, self._limits, self._audit = root, limits or Limits(), audit
        self._proven, self._clock, self._read = proven, clock, read

    def read(self, task: str | None, part: str, precision: str, reserve: Reserve, who: str = "") -> PartBytes:
        """Return a part's proven bytes; blocks on the disk. Raises PartRefused, UnknownTask, UnknownPart, or what
        ``reserve`` raises; then there is one audit line, and nothing is held. After success the line is the caller's
        (`PartBytes.line`), once the part is published. ``task`` None is for loads of the operator.
        """
        attempt = _Attempt(who, task, str(part), str(precision), self._clock())
        try:
            return self._read_part(attempt, reserve)
        except PageinError as error:
            self._audit(_refusal(attempt, error, self._clock()))
            raise

    def _read_part(self, attempt: _Attempt, reserve: Reserve) -> PartBytes:
        part = self._allowed(attempt)
        entry = part.file(attempt.precision)
        attempt.part, attempt.file, attempt.digest = part.name, entry.file, entry.sha256
        if part.role is not Role.BACKBONE and entry.nbytes > self._limits.nbytes:
            why = f"has {entry.nbytes} bytes, the limit is {self._limits.nbytes}"
            raise PartRefused(entry.file, why, bytes=entry.nbytes, limit=self._limits.nbytes)
        descriptor, status = self._root.open(entry.file, entry.nbytes)
        try:
            give_back = reserve(entry.nbytes)
        except BaseException:
            close(descriptor)
            raise
        buffer, fast = self._fill(descriptor, status, entry, attempt, give_back)
        try:
            tensors = read_tensors(entry, _in(buffer), buffer.nbytes)
        except BaseException:
            buffer.close()
            give_back()
            raise
        seconds = self._clock() - attempt.began
        return PartBytes(
            part.name, attempt.precision, entry, buffer, tensors, attempt.who, attempt.task, seconds, fast, give_back
        )

    def _allowed(self, attempt: _Attempt) -> Part:
        """Return the part; it must be one that the task's calls need, or one that may stand in the place of such."""
        if attempt.task is None:
            return self.plan.part(attempt.part)
        task = self.plan.task(attempt.task)
        attempt.task = task.name
        part = self.plan.part(attempt.part)
        stands_for: Part | None = part
        while stands_for is not None and stands_for.name not in task.parts:
            before = stands_for.replaces
            stands_for = self.plan.parts[before] if before is not None else None
        if stands_for is None:
            raise PartRefused(part.name, f"is no part of the task {task.name!r}")
        return part

    def _fill(
        self,
        descriptor: int,
        status: stat_result,
        entry: PartFile,
        attempt: _Attempt,
        give_back: Callable[[], None],
    ) -> tuple[Buffer, bool]:
        """Return the buffer with the file's bytes, proven by their digest, and whether that was the fast one."""
        try:
            buffer = Buffer(entry.nbytes)
        except (OSError, OverflowError, MemoryError) as error:  # the system has no more to give
            close(descriptor)
            give_back()
            raise PartRefused(entry.file, f"no memory for its {entry.nbytes} bytes: {error}") from None
        fast = self._proven.digest_of(entry.sha256, stamp_of(status)) if self._proven is not None else None
        full: Hash | None = hashlib.sha256() if fast is None else None
        quick: Hash | None = self._proven.new_hash() if self._proven is not None else None
        reading = Reading(descriptor, buffer, self._read_on, self._clock, give_back)
        hashes = [one for one in (full, quick) if one is not None]
        try:
            after = reading.run(entry.file, self._limits.seconds(entry.nbytes), *hashes)
        finally:
            attempt.nbytes = reading.got
        try:
            if stamp_of(after) != stamp_of(status):
                raise PartRefused(
                    entry.file,
                    f"changed while it was read: {status.st_size} bytes at first, {after.st_size} now",
                    bytes=after.st_size,
                    planned_bytes=status.st_size,
                )
            self._prove(entry, buffer, full, quick, fast, attempt)
        except BaseException:
            buffer.close()
            give_back()
            raise
        if self._proven is not None and quick is not None:
            self._proven.remember(entry.sha256, stamp_of(status), quick.hexdigest())
        return buffer, fast is not None

    def _read_on(self, descriptor: int, into: memoryview, offset: int) -> int:
        count = self._read(descriptor, into, offset)
        with self._counting:
            self.bytes_read += count
        return count

    def _prove(
        self, entry: PartFile, buffer: Buffer, full: Hash | None, quick: Hash | None, fast: str | None, say: _Attempt
    ) -> None:
        if full is None:
            assert quick is not None
            if quick.hexdigest() == fast:
                return
            full = hashlib.sha256(buffer.view)
        found = full.hexdigest()
        if found != entry.sha256:
            say.digest = found
            raise _damaged(entry, buffer, found)


def read_tensors(entry: PartFile, at: Callable[[int, int], bytes], size: int) -> Mapping[str, Placed]:
    """Return where each tensor of a file lies, by its header; raises PartRefused unless all is as planned.

    ``at`` gives bytes of the file: from which one on, and how many.
    """
    path = Path(entry.file)
    try:
        length = header_length(path, at(0, 8), _longest_header(entry))
        if 8 + length > size:
            raise PartRefused(entry.file, f"has a header of {length} bytes, the file has {size}", header=length)
        table = parse_header(path, at(8, length), size, places=True)
    except BadModelFile as error:
        raise PartRefused(entry.file, error.message.removeprefix(f"{path}: ")) from None
    found = sorted(table.tensors or (), key=lambda tensor: (tensor.offset, tensor.nbytes))
    return MappingProxyType(_compare(entry, found))


def _in(buffer: Buffer) -> Callable[[int, int], bytes]:
    return lambda offset, count: bytes(buffer.view[offset : offset + count])


def _compare(entry: PartFile, found: list[StoredTensor]) -> dict[str, Placed]:
    placed: dict[str, Placed] = {}
    for tensor in found:
        if tensor.name.startswith(FILLER):
            if tensor.dtype != "U8" or len(tensor.shape) != 1 or tensor.nbytes >= PAGE:
                raise PartRefused(entry.file, f"{tensor.name[:80]!r} of {tensor.nbytes} bytes fills no gap")
            continue
        planned = entry.tensors.get(tensor.name)
        if planned is None:
            raise PartRefused(entry.file, f"has the tensor {tensor.name[:80]!r}, which the plan does not have")
        if planned.dtype != tensor.dtype:
            why = f"{tensor.name!r} is {tensor.dtype}, the plan says {planned.dtype}"
            raise PartRefused(entry.file, why, tensor=tensor.name)
        if planned.shape != tensor.shape:
            why = f"{tensor.name!r} has the shape {list(tensor.shape)}, the plan says {list(planned.shape)}"
            raise PartRefused(entry.file, why, tensor=tensor.name)
        placed[tensor.name] = Placed(tensor.offset, tensor.nbytes, tensor.dtype, tensor.shape)
    missing = [name for name in entry.tensors if name not in placed]
    if missing:
        why = f"has {len(placed)} of {len(entry.tensors)} tensors, {missing[0]!r} is not there"
        raise PartRefused(entry.file, why, tensors=len(placed), planned_tensors=len(entry.tensors))
    by_plan = [name for name, one in entry.tensors.items() if one.nbytes]
    if [name for name, place in placed.items() if place.nbytes] != by_plan:
        raise PartRefused(entry.file, "has its tensors in another order than the plan")
    return placed


def _longest_header(entry: PartFile) -> int:
    """Bytes that a header of these tensors can take: every sign of a name escaped, and a filler beside each tensor."""
    return _NOTES + sum(6 * len(name) + 512 + 24 * len(one.shape) for name, one in entry.tensors.items())


def _damaged(entry: PartFile, buffer: Buffer, found: str) -> PartRefused:
    """Say where the damage is, as far as can be told."""
    try:
        read_tensors(entry, _in(buffer), buffer.nbytes)
        where = "its header reads as planned, so it is in the tensors' bytes or in the header's notes"
    except PartRefused as error:
        where = f"its header does not read as planned: {error.details['reason']}"
    return PartRefused(
        entry.file,
        f"its bytes have the digest {found}, the plan says {entry.sha256}; {where}",
        hint="make the split again ('pagein split apply'): it makes this file anew and keeps the others",
        digest=found,
        planned_digest=entry.sha256,
    )


def _refusal(attempt: _Attempt, error: PageinError, now: float) -> AuditLine:
    ms = round((now - attempt.began) * 1000, 3)
    return AuditLine(
        attempt.who,
        attempt.task,
        attempt.part,
        attempt.precision,
        error.code,
        attempt.file,
        attempt.digest,
        attempt.nbytes,
        ms,
        error.message,
    )
