"""How much the folder may take: its cap, the disk's floor, and what lies there beside the slots."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from pagein.kv.disk.segments import Segments
from pagein.kv.snapshots.answers import Skipped
from pagein.units import format_bytes

_DISK_BLOCK = 512
"""Bytes in which st_blocks counts."""
_ROWS = 64 * 1024
"""Bytes by which the catalogue may grow with one block."""
_LINK = 1024
"""The same for each block of the text that it does not know yet."""


@dataclass(slots=True)
class Room:
    """The account of a folder, in bytes of the disk."""

    folder: Path
    segments: Segments
    cap: int | None
    floor: int
    lent: int = 0
    """Bytes of nameless files of this process's turns (`Keeping.lend`)."""

    def other(self) -> int:
        """Bytes of all files but those of slots: the catalogue with its log, and what is not ours."""
        try:
            with os.scandir(self.folder) as entries:
                return sum(_size(entry) for entry in entries if not self.segments.owns(entry.name))
        except FileNotFoundError:  # somebody removed the folder
            return 0

    def used(self) -> int:
        """Bytes of all files, those without a name included."""
        return self.segments.bytes + self.lent + self.other()

    def rows(self, links: int) -> int:
        """Bytes that the catalogue may need for a block of a text of so many."""
        return _ROWS + _LINK * links

    def lacking(self, growth: int) -> int:
        """Bytes that must leave before ``growth`` more may be written."""
        over = 0 if self.cap is None else self.used() + growth - self.cap
        return max(over, self.floor + growth - self._free())

    def never(self, need: int) -> Skipped | None:
        """Why so many bytes are not written whoever leaves; None where they may be."""
        if self.cap is None or need <= self.cap:
            return None
        return Skipped(f"it needs {format_bytes(need)}, the cap of the store is {format_bytes(self.cap)}")

    def refusal(self, need: int, lacking: int) -> Skipped:
        """Why so many bytes are not written: others may not leave for them."""
        cap = "" if self.cap is None else f" of {format_bytes(self.cap)}"
        return Skipped(
            f"no room: it needs {format_bytes(need)}, {format_bytes(lacking)} more than there are, and too little may "
            f"leave (used {format_bytes(self.used())}{cap}; the disk has {format_bytes(self._free())} free and must "
            f"keep {format_bytes(self.floor)})"
        )

    def _free(self) -> int:
        try:
            return shutil.disk_usage(self.folder).free
        except OSError:
            return 0


def _size(entry: os.DirEntry[str]) -> int:
    try:
        if not entry.is_dir(follow_symlinks=False):
            return entry.stat(follow_symlinks=False).st_blocks * _DISK_BLOCK
    except FileNotFoundError:
        return 0
    files = (Path(folder) / name for folder, _, names in os.walk(entry.path) for name in names)
    return sum(file.lstat().st_blocks * _DISK_BLOCK for file in files)
