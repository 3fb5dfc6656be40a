"""Writes a split: each part's files whole or not at all, the plan last: a folder holds the old split or the new.

A file's name has its content's digest in it, so that a new split never writes over a file of the old one. A run that
was ended goes on where it stopped: finished files are known by their header, which says what they were made of, and
proven by their digest. What is left over is swept, and said.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pagein.catalog.safetensors import FILLER
from pagein.catalog.split.names import DIGITS, file_name, part_of_file
from pagein.catalog.split.plan import PLAN_NAME, Part, PartFile, SplitPlan, TensorEntry, encode
from pagein.catalog.split.reader import parse_plan
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import InUse, PageinError, PlanRefused, SplitBroken
from pagein.kv.snapshots.snapshot import DRAFT, create_private, draft_of, sync_folder
from pagein.parts.splitting.making import FileMaking, Making, lay_out
from pagein.weights.packed.shards import check_space

LOCK_NAME = ".split_plan.lock"
_CHUNK = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class Step:
    """One file that is there now."""

    file: str
    nbytes: int
    kept: bool
    """It was there before, whole and of the same content."""
    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Written:
    """What a run did."""

    plan: SplitPlan
    wrote: tuple[str, ...]
    kept: tuple[str, ...]
    swept: tuple[str, ...]
    """What an ended run or an older split had left."""
    earlier: tuple[str, ...] = field(default=())
    """Files of the split that was replaced: they stay until the next one, for who still serves from them."""


def forecast(folder: Path, making: Making) -> tuple[int, int]:
    """Return the bytes of all files, and of those that are not there yet; raises SplitBroken. Writes nothing."""
    files = lay_out(making)
    missing = sum(file.nbytes for file in files if find_finished(folder, file) is None)
    return sum(file.nbytes for file in files), missing


def write_split(folder: Path, making: Making, progress: Callable[[Step], None] = lambda step: None) -> Written:
    """Write a split and return what was done; on return it is on the disk, and before, the old one was.

    Raises DiskFull before anything is written, InUse where another run writes here or has meanwhile, SplitBroken where
    a tensor comes out otherwise than said, PlanRefused where parts and tasks do not fit together; then the old split
    stands.
    """
    files = lay_out(making)
    folder.mkdir(parents=True, exist_ok=True)
    with _only_writer(folder):
        before = _plan_before(folder)
        _check_standing(folder, making, before)
        swept = sweep_drafts(folder)
        found = [find_finished(folder, file) for file in files]
        _check_plan(making, files)
        check_space(folder, sum(file.nbytes for file, have in zip(files, found, strict=True) if have is None))
        total, done = sum(file.nbytes for file in files), 0
        entries: list[PartFile] = []
        for file, have in zip(files, found, strict=True):
            digest = have or write_file(folder, file)
            entries.append(_entry(file, digest))
            done += file.nbytes
            progress(Step(entries[-1].file, file.nbytes, have is not None, done, total))
        plan = _plan(making, files, entries)
        write_plan(folder, plan)
        swept += sweep_parts(folder, plan, before)
    kept = tuple(entry.file for entry, have in zip(entries, found, strict=True) if have)
    wrote = tuple(entry.file for entry, have in zip(entries, found, strict=True) if not have)
    return Written(plan, wrote, kept, tuple(swept), tuple(_only_of(before, plan)))


def write_plan(folder: Path, plan: SplitPlan) -> None:
    """Put a plan in the place of the one before, whole or not at all; raises PlanRefused where it is not sound."""
    data = encode(plan)
    parse_plan(data, PLAN_NAME)  # what would not be read must not be written
    draft = draft_of(folder / PLAN_NAME)
    try:
        with create_private(draft) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, folder / PLAN_NAME)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(folder)


def write_file(folder: Path, file: FileMaking) -> str:
    """Write one file of a part, whole or not at all, under the name of its content; returns its sha256."""
    draft = draft_of(folder / f"{file.part}-{file.precision}.safetensors")
    hashed = hashlib.sha256()
    try:
        with create_private(draft) as target:
            for chunk in _content(file):
                hashed.update(chunk)
                target.write(chunk)
            target.flush()
            os.fsync(target.fileno())
        os.rename(draft, folder / file_name(file.part, hashed.hexdigest()))
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(draft)
        raise
    sync_folder(folder)
    return hashed.hexdigest()


def find_finished(folder: Path, file: FileMaking) -> str | None:
    """Return the sha256 of a file that is there already, every byte as it was written; None otherwise.

    Nothing but its own content says so: the header that it must have, and the digest in its name.
    """
    if not folder.is_dir():
        return None
    for name in sorted(os.listdir(folder)):
        parsed = part_of_file(name)
        if parsed is not None and parsed[0] == file.part:
            digest = _digest_if_ours(folder / name, file)
            if digest is not None and digest[:DIGITS] == parsed[1]:
                return digest
    return None


def sweep_drafts(folder: Path) -> list[str]:
    """Remove what runs that were ended had begun; returns the names."""
    drafts = [name for name in sorted(os.listdir(folder)) if _is_draft(name)]
    for name in drafts:
        os.unlink(folder / name)
    return drafts


def sweep_parts(folder: Path, plan: SplitPlan, before: SplitPlan | None) -> list[str]:
    """Remove files of parts that neither this plan nor the one that it replaced names; returns the names."""
    named = {entry.file for one in (plan, before) if one is not None for _, _, entry in one.files()}
    strays = [name for name in sorted(os.listdir(folder)) if part_of_file(name) is not None and name not in named]
    for name in strays:
        os.unlink(folder / name)
    if strays:
        sync_folder(folder)
    return strays


def leftovers(names: list[str], plan: SplitPlan) -> list[str]:
    """Return which of a folder's files look like parts or drafts and are none of the plan's; nothing reads them."""
    named = {entry.file for _, _, entry in plan.files()}
    return [name for name in names if (part_of_file(name) is not None and name not in named) or _is_draft(name)]


def _is_draft(name: str) -> bool:
    return name.startswith(".") and name.endswith((f".safetensors{DRAFT}", f"{PLAN_NAME}{DRAFT}"))


@contextlib.contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(folder / LOCK_NAME, flags, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUse(f"{folder}: another run writes a split here", hint="wait until it is done") from None
        yield
    finally:
        os.close(descriptor)


def _plan_before(folder: Path) -> SplitPlan | None:
    """The split that stands here; a plan that cannot be read does not keep anyone from writing a sound one."""
    if not (folder / PLAN_NAME).exists():
        return None
    try:
        with PartsRoot(folder) as root:
            return read_plan(root)
    except PageinError:
        return None


def _check_standing(folder: Path, making: Making, before: SplitPlan | None) -> None:
    """Raise InUse where parts joined or went since it was decided what stays: this plan would drop or revive them."""
    now = before.parts if before is not None else {}
    if making.standing and dict(making.standing) != dict(now):
        changed = sorted(name for name in {*making.standing, *now} if making.standing.get(name) != now.get(name))
        why = f"another run changed the split meanwhile ({', '.join(changed[:4])})"
        raise InUse(f"{folder}: {why}, nothing was written", hint="do it again")


def _content(file: FileMaking) -> Iterator[bytes | memoryview]:
    yield file.header
    for spec in file.specs:
        if spec.name.startswith(FILLER):
            yield bytes(spec.nbytes)
            continue
        written = 0
        for chunk in file.tensors[spec.name].chunks():
            written += memoryview(chunk).nbytes
            yield chunk
        if written != spec.nbytes:
            raise SplitBroken(
                f"part {file.part!r}: the tensor {spec.name!r} came out as {written} bytes in {file.precision}, "
                f"{spec.nbytes} were planned",
                part=file.part,
                tensor=spec.name,
                bytes=written,
                planned_bytes=spec.nbytes,
            )


def _digest_if_ours(path: Path, file: FileMaking) -> str | None:
    """Return the sha256 of a file of ours that has the expected size and header; None for others, mostly unread."""
    hashed = hashlib.sha256()
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb", buffering=0) as source:
            status = os.fstat(descriptor)
            if status.st_uid not in (os.geteuid(), os.stat(path.parent).st_uid) or status.st_nlink != 1:
                return None  # whoever wrote it could have given it any digest in its name
            if status.st_size != file.nbytes or source.read(len(file.header)) != file.header:
                return None
            hashed.update(file.header)
            while chunk := source.read(_CHUNK):
                hashed.update(chunk)
    except OSError:
        return None
    return hashed.hexdigest()


def _entry(file: FileMaking, digest: str) -> PartFile:
    tensors = {
        spec.name: TensorEntry(spec.shape, spec.dtype, spec.nbytes)
        for spec in file.specs
        if not spec.name.startswith(FILLER)
    }
    return PartFile(file_name(file.part, digest), file.nbytes, digest, tensors, file.layout)


def _check_plan(making: Making, files: list[FileMaking]) -> None:
    """Raise PlanRefused before anything is written where parts and tasks do not fit together, whatever the digests."""
    _check_sound(_plan(making, files, [_entry(file, "0" * 64) for file in files]))


def _check_sound(plan: SplitPlan) -> None:
    try:
        parse_plan(encode(plan), PLAN_NAME)
    except PlanRefused as error:
        error.hint = "nothing was written; correct the tasks and parts that the split is made of"
        raise


def _plan(making: Making, files: list[FileMaking], entries: list[PartFile]) -> SplitPlan:
    by_part: dict[str, dict[str, PartFile]] = {}
    for file, entry in zip(files, entries, strict=True):
        by_part.setdefault(file.part, {})[file.precision] = entry
    users = {
        name: tuple(sorted(task for task, one in making.tasks.items() if name in one.parts)) for name in making.all
    }
    parts = {
        name: Part(name, part.role, users[name], by_part[name], part.replaces) for name, part in making.parts.items()
    }
    parts |= {name: replace(part, tasks=users[name]) for name, part in making.standing.items()}
    return SplitPlan(
        making.model,
        making.sources,
        making.tasks,
        parts,
        making.tied,
        making.buffers,
        making.untouched,
        making.saves,
        making.made,
    )


def _only_of(before: SplitPlan | None, plan: SplitPlan) -> list[str]:
    if before is None:
        return []
    named = {entry.file for _, _, entry in plan.files()}
    return sorted({entry.file for _, _, entry in before.files()} - named)
