"""Proves a split by every byte, without loading it: some MiB of memory, however large the model."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pagein.catalog.split.plan import Part, PartFile, SplitPlan
from pagein.catalog.split.root import PartsRoot, read_plan
from pagein.errors import PartRefused
from pagein.parts.files.part_file import read_tensors
from pagein.parts.splitting.writing import leftovers

_CHUNK = 4 * 1024**2


@dataclass(frozen=True, slots=True)
class FileCheck:
    """One file of the plan, and what is wrong with it."""

    part: Part
    precision: str
    entry: PartFile
    fault: str | None


@dataclass(frozen=True, slots=True)
class SplitCheck:
    """A split as it lies on the disk."""

    plan: SplitPlan
    files: tuple[FileCheck, ...]
    leftovers: tuple[str, ...]
    """Files that look like parts or drafts and are none of the plan's; nothing reads them."""

    @property
    def faults(self) -> list[FileCheck]:
        """The files that would be refused."""
        return [one for one in self.files if one.fault is not None]


Vouch = Callable[[PartsRoot], Callable[[bytes], None]]
"""What `signing.Trust.vouch` is."""


def check_split(
    folder: Path, done: Callable[[FileCheck], None] = lambda one: None, vouch: Vouch | None = None
) -> SplitCheck:
    """Read a split's plan and every byte of its files; raises PlanRefused, and tells of the files by `SplitCheck`.

    ``vouch``: asked first whether the plan and what lies beside it is signed.
    """
    with PartsRoot(folder) as root:
        plan = read_plan(root, vouch(root) if vouch is not None else None)
        checks: list[FileCheck] = []
        for part, precision, entry in plan.files():
            fault = None
            try:
                verify(root, entry)
            except PartRefused as error:
                fault = str(error.details["reason"])
            checks.append(FileCheck(part, precision, entry, fault))
            done(checks[-1])
        return SplitCheck(plan, tuple(checks), tuple(leftovers(root.names(), plan)))


def verify(root: PartsRoot, entry: PartFile) -> None:
    """Compare a file with the plan by size, digest and header; raises PartRefused."""
    descriptor, _ = root.open(entry.file, entry.nbytes)
    with open(descriptor, "rb", buffering=0) as file:
        hashed = hashlib.sha256()
        try:
            while chunk := file.read(_CHUNK):
                hashed.update(chunk)
        except OSError as error:
            raise PartRefused(entry.file, f"cannot be read: {error.strerror}") from None
        if hashed.hexdigest() != entry.sha256:
            why = f"its bytes have the digest {hashed.hexdigest()}, the plan says {entry.sha256}"
            raise PartRefused(entry.file, why, digest=hashed.hexdigest(), planned_digest=entry.sha256)
        read_tensors(entry, lambda offset, count: os.pread(descriptor, count, offset), entry.nbytes)
