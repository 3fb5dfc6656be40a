"""The files of control groups: the one place that touches them, so that a test can put its own tree there."""

from __future__ import annotations

import os
from pathlib import Path

from pagein.memory.probes.linux import parse_counters, read_text


class CgroupFiles:
    """Reads and writes cgroup files below a root folder; what is missing reads as None, writing raises OSError."""

    def __init__(self, root: Path = Path("/")) -> None:
        """``root`` is the machine's, or that of a captured or imitated tree."""
        self.root = root

    def read(self, path: Path) -> str | None:
        """Return a file's text without the line's end."""
        text = read_text(path)
        return None if text is None else text.strip()

    def number(self, path: Path) -> int | None:
        """Return the number in a file; None for ``max`` and for what cannot be read."""
        text = self.read(path) or ""
        return int(text) if text.isdigit() else None

    def counters(self, path: Path) -> dict[str, int]:
        """Return the ``name number`` lines of a file."""
        return parse_counters(self.read(path) or "")

    def words(self, path: Path) -> list[str]:
        """Return what stands in a file between blanks: controllers, process ids."""
        return (self.read(path) or "").split()

    def write(self, path: Path, value: int | str) -> None:
        """Write one value; raises OSError with the kernel's reason (EBUSY, EACCES, ENOENT)."""
        descriptor = os.open(path, os.O_WRONLY)  # never creates: a file that is not there is a facility that is not
        try:
            os.write(descriptor, str(value).encode())
        finally:
            os.close(descriptor)

    def try_write(self, path: Path, value: int | str) -> bool:
        """Write a value that not every kernel takes; returns whether it did."""
        try:
            self.write(path, value)
        except OSError:
            return False
        return True

    def make(self, group: Path) -> None:
        """Make a group, or keep the one that is there; raises OSError."""
        group.mkdir(exist_ok=True)

    def remove(self, group: Path) -> bool:
        """Remove a group without children; returns False while something is in it."""
        try:
            group.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

    def children(self, group: Path) -> list[Path]:
        """Return the groups right below a group."""
        try:
            return sorted(Path(entry.path) for entry in os.scandir(group) if entry.is_dir(follow_symlinks=False))
        except OSError:
            return []

    def tree(self, group: Path) -> list[Path]:
        """Return a group and all groups below it, the innermost first: the order in which they can be removed."""
        return [*(inner for child in self.children(group) for inner in self.tree(child)), group]

    def pids(self, group: Path) -> list[int]:
        """Return the processes right in a group; 0 stands for those of other pid namespaces and is left out."""
        return [int(word) for word in self.words(group / "cgroup.procs") if word.isdigit() and word != "0"]

    def may_write(self, *paths: Path) -> bool:
        """Whether this process may write to all of these."""
        return all(os.access(path, os.W_OK) for path in paths)
