"""Remembers which files were proven by sha256, so that bringing the same part back need not cost that again.

The first reading of a file hashes it twice at once: sha256, which the plan names, and xxh3, which is remembered with
the file's stamp: device, inode, size, time of the last write, and time of the last change of status, which no one can
set. While the stamp stays, a later reading compares xxh3 alone: that still finds bits that a disk or memory lost.
Measured on one core, x86-64 with SHA-NI: sha256 1.7 GiB/s, xxh3 22 GiB/s.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
from typing import cast

from pagein.parts.files.reading import Hash

Stamp = tuple[int, int, int, int, int]
MOST = 4096
"""Files that are remembered."""


def stamp_of(status: os.stat_result) -> Stamp:
    """Return what tells a file's content from another's: device, inode, size, both times."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Proven:
    """Fast digests of fully proven files, in memory only: another process proves anew. Any thread may ask."""

    def __init__(self) -> None:
        """Raises ModuleNotFoundError without xxhash (`available`)."""
        self._module = importlib.import_module("xxhash")
        self._lock = threading.Lock()
        self._known: dict[tuple[str, Stamp], str] = {}

    @staticmethod
    def available() -> bool:
        """Tell whether xxhash is installed; pagein[torch] has it."""
        return importlib.util.find_spec("xxhash") is not None

    def new_hash(self) -> Hash:
        """Return an empty fast hash."""
        return cast(Hash, self._module.xxh3_128())

    def digest_of(self, sha256: str, stamp: Stamp) -> str | None:
        """Return the fast digest of a file that was proven to have this sha256 and has not changed since."""
        with self._lock:
            return self._known.get((sha256, stamp))

    def remember(self, sha256: str, stamp: Stamp, digest: str) -> None:
        """Keep the fast digest of a file that was just proven; the oldest makes room."""
        with self._lock:
            self._known[sha256, stamp] = digest
            while len(self._known) > MOST:
                del self._known[next(iter(self._known))]
