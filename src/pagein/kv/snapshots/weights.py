"""The digest of weight files by every byte: computed once, remembered as long as a file stands untouched.

`catalog.identity` samples a file, which is enough for remembered sizes. It is not enough here: a fine-tune that differs
in one tensor has another KV cache, and an engine would take the wrong one silently (scenario 4 of the KV list).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from pagein.kv.snapshots.snapshot import create_private, draft_of
from pagein.kv.snapshots.treehash import BLOCK, TreeHash

SETTLED_SECONDS = 2.0
"""A file that was changed within this time before is not remembered: its time stamps could not show the next change."""
MOST_REMEMBERED = 4096
_LARGEST_MEMORY = 4 * 1024**2


class Cancelled(Exception):
    """The caller no longer wants the digest."""


class WeightDigests:
    """Digests of weight files, remembered in a small file. Thread-safe; hashing blocks for as long as reading takes."""

    def __init__(self, memory: Path | None) -> None:
        self._memory = memory
        self._lock = threading.Lock()
        self._known = _read(memory) if memory is not None else {}

    def digest(self, files: Iterable[Path], cancelled: Callable[[], bool] = lambda: False) -> str:
        """Return the digest of a model's files, in the order of their names: 64 hex digits.

        Hashes about 1 GB/s a core where a file is not remembered. Raises OSError for one that cannot be read, and
        Cancelled soon after ``cancelled`` says so.
        """
        whole = hashlib.sha256(b"pagein weights 1\n")
        for path in sorted(files, key=lambda file: file.name):
            whole.update(bytes.fromhex(self._digest_file(path, cancelled)))
        return whole.hexdigest()

    def known(self, files: Iterable[Path]) -> bool:
        """Tell whether `digest` would answer at once."""
        with self._lock:
            return all(_stamp(path) in self._known for path in files)

    def _digest_file(self, path: Path, cancelled: Callable[[], bool]) -> str:
        begun, stamp = time.time(), _stamp(path)
        with self._lock:
            found = self._known.get(stamp)
        if found is not None:
            return found
        with TreeHash() as tree:
            for block in _blocks(path):
                if cancelled():
                    raise Cancelled(str(path))
                tree.update(block)
            digest = tree.digest().hex()
        if _stamp(path) == stamp and begun - os.stat(path).st_ctime > SETTLED_SECONDS:
            self._remember(str(path), stamp, digest)
        return digest

    def _remember(self, path: str, stamp: str, digest: str) -> None:
        with self._lock:
            kept = [item for item in self._known.items() if not item[0].endswith(f" {path}")]
            self._known = dict([*kept, (stamp, digest)][-MOST_REMEMBERED:])
            if self._memory is not None:
                with contextlib.suppress(OSError):  # forgotten at the next start, no worse
                    _write(self._memory, self._known)


def _stamp(path: Path) -> str:
    """What tells that a file is untouched; the time of its last change of any kind shows a set-back time of writing."""
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino} {path}"


def _blocks(path: Path) -> Iterator[bytes]:
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block


def _read(memory: Path) -> dict[str, str]:
    """What is remembered; nothing where the file is not what was written."""
    try:
        with open(memory, "rb") as file:
            value = json.loads(file.read(_LARGEST_MEMORY))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {stamp: digest for stamp, digest in value.items() if isinstance(digest, str) and _is_digest(digest)}


def _is_digest(text: str) -> bool:
    return len(text) == 64 and all(letter in "0123456789abcdef" for letter in text)


def _write(memory: Path, known: dict[str, str]) -> None:
    draft = draft_of(memory)
    with create_private(draft) as file:
        file.write(json.dumps(known).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(draft, memory)
