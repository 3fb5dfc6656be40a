"""A reader on a bench: every byte, line and reservation of it is counted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from pagein.catalog.split.plan import SplitPlan
from pagein.catalog.split.root import PartsRoot
from pagein.errors import PageinError, PartRefused
from pagein.parts.files.audit import AuditLine
from pagein.parts.files.part_file import PartReader
from pagein.parts.files.reading import read_from_file

LITTLE = 16 * 1024**2
"""Bytes that a refusal may cost beside the reserved buffer (scenario 16)."""


class Room:
    """An allowance that counts."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def __call__(self, nbytes: int):
        self.held += nbytes
        self.most = max(self.most, self.held)

        def give_back() -> None:
            self.held -= nbytes

        return give_back


class Bench:
    """A folder with a plan, and a reader whose every byte, line and reservation is counted."""

    def __init__(self, folder: Path, plan: SplitPlan, **options: object) -> None:
        self.folder, self.plan = folder, plan
        self.lines: list[AuditLine] = []
        self.room = Room()
        self.bytes_read = 0
        self.options = options

    def count(self, descriptor: int, into: memoryview, offset: int) -> int:
        got = read_from_file(descriptor, into, offset)
        self.bytes_read += got
        return got

    def file(self, part: str) -> Path:
        return self.folder / self.plan.parts[part].files["stored"].file

    def read(self, task: str | None = "tag", part: str = "tag", precision: str = "stored"):
        options = {"read": self.count, "audit": self.lines.append, **self.options}
        with PartsRoot(self.folder) as root:
            return PartReader(root, self.plan, **options).read(task, part, precision, self.room, "somebody")

    def refuse(self, *arguments: object, kind: type[PageinError] = PartRefused) -> PageinError:
        """Read, and return the refusal, which left nothing held, one line, and took little memory."""
        tracemalloc.start()
        try:
            with pytest.raises(kind) as told:
                self.read(*arguments)
            assert tracemalloc.get_traced_memory()[1] < LITTLE
        finally:
            tracemalloc.stop()
        assert self.room.held == 0
        assert len(self.lines) == 1
        assert self.lines[0].result == told.value.code
        assert self.lines[0].who == "somebody"
        return told.value
