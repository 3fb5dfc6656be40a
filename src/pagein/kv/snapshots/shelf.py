"""The store's folder: one folder for each fingerprint, one for what did not verify; all for the owner only.

    <root>/<32 hex digits of the fingerprint>/<snapshot id>.kv      snapshots
                                             /.<snapshot id>.kv.draft   being written, or left by a crash
    <root>/damaged/                                                 moved aside, a few of them

What has another name is not ours: it is counted and never touched.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pagein.errors import SnapshotDamaged
from pagein.kv.snapshots.answers import Entry
from pagein.kv.snapshots.key import Fingerprint
from pagein.kv.snapshots.reader import SnapshotReader
from pagein.kv.snapshots.snapshot import DRAFT, sync_folder

log = logging.getLogger(__name__)

MOST_DAMAGED = 4
"""Damaged snapshots that are kept for whoever wants to look at them."""
_FOLDER = re.compile(r"[0-9a-f]{32}")
_SNAPSHOT = re.compile(r"[0-9a-f]{24}\.kv")
_DRAFT = re.compile(rf"\.[0-9a-f]{{24}}\.kv{re.escape(DRAFT)}")
_DAMAGED = "damaged"


@dataclass(slots=True)
class Contents:
    """What a look at the folder found."""

    snapshots: list[tuple[Entry, bytes, float]] = field(default_factory=list)
    """Each with its packed token ids and when it was last used (seconds since the epoch)."""
    damaged: list[tuple[Path, str]] = field(default_factory=list)
    """Snapshots that do not verify, still in their place, with what is wrong."""
    drafts: list[Path] = field(default_factory=list)
    other_bytes: int = 0
    """Of files that are none of ours, or cannot be read now."""


class Shelf:
    """The folder; it knows names and files, and decides nothing. Every method blocks on the disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def prepare(self) -> None:
        """Make the folder, for its owner only."""
        self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
        os.chmod(self.root, 0o700)

    def place(self, fingerprint: Fingerprint, snapshot: str) -> Path:
        """Where a snapshot lies."""
        return self.root / fingerprint.digest[:32] / f"{snapshot}.kv"

    def make_folder(self, fingerprint: Fingerprint) -> None:
        """Make the folder of a fingerprint, on disk on return."""
        folder = self.root / fingerprint.digest[:32]
        if not folder.is_dir():
            self.prepare()
            folder.mkdir(mode=0o700, exist_ok=True)
            sync_folder(self.root)

    def look(self) -> Contents:
        """Read all headers and token ids, none of the payloads; changes nothing."""
        found = Contents()
        for folder in _list(self.root):
            if not folder.is_dir(follow_symlinks=False):
                found.other_bytes += _size(folder.path)
            elif _FOLDER.fullmatch(folder.name):
                for file in _list(Path(folder.path)):
                    self._look_at(Path(file.path), found)
            elif folder.name != _DAMAGED:
                found.other_bytes += sum(_size(file) for file in _files_below(Path(folder.path)))
        return found

    def _look_at(self, path: Path, found: Contents) -> None:
        if _DRAFT.fullmatch(path.name):
            found.drafts.append(path)
            return
        if not _SNAPSHOT.fullmatch(path.name):
            found.other_bytes += sum(_size(file) for file in _files_below(path))
            return
        try:
            with SnapshotReader(path) as reader:
                used = os.stat(path, follow_symlinks=False).st_mtime
                if reader.header.fingerprint.digest[:32] != path.parent.name or reader.id != path.stem:
                    raise SnapshotDamaged(f"{path.name}: lies under a name that is not its own", path=str(path))
                entry = Entry(path.stem, path, reader.header, reader.bytes)
                found.snapshots.append((entry, reader.packed_tokens, used))
        except SnapshotDamaged as error:
            found.damaged.append((path, error.message))
        except OSError as error:
            log.warning("snapshot %s cannot be read now: %s", path, error)
            found.other_bytes += _size(path)

    def set_aside(self, path: Path, most_bytes: int) -> None:
        """Move a damaged snapshot away, and keep only the newest few of them, within ``most_bytes`` together."""
        folder = self.root / _DAMAGED
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            os.replace(path, folder / f"{time.time_ns():020}-{path.name}")
        except OSError:
            remove(path)
        self.trim_damaged(most_bytes)

    def trim_damaged(self, most_bytes: int) -> None:
        """Keep only the newest few damaged snapshots, within ``most_bytes`` together."""
        total = 0
        newest = sorted(_list(self.root / _DAMAGED), key=lambda file: file.name, reverse=True)
        for place, file in enumerate(newest):
            total += _size(file.path)
            if place >= MOST_DAMAGED or total > most_bytes:
                remove(Path(file.path))

    def damaged_bytes(self) -> int:
        """Bytes of what was moved aside."""
        return sum(_size(file) for file in _files_below(self.root / _DAMAGED))

    def drop_empty_folders(self) -> None:
        """Remove the folders of fingerprints that hold nothing any more."""
        for folder in _list(self.root):
            if _FOLDER.fullmatch(folder.name):
                with contextlib.suppress(OSError):
                    os.rmdir(folder.path)

    def free_bytes(self) -> int:
        """Bytes that the disk has free for us; 0 where it does not say."""
        try:
            if not self.root.is_dir():
                self.prepare()
            return shutil.disk_usage(self.root).free
        except OSError as error:
            log.warning("the disk of %s does not say what it has free: %s", self.root, error)
            return 0


def remove(path: Path) -> bool:
    """Remove a file; False where it still lies there. What is gone already is gone."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            os.unlink(path)
    except FileNotFoundError:
        return True
    except OSError as error:
        log.warning("%s cannot be removed: %s", path, error)
        return False
    return True


def _list(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
    except OSError as error:
        log.warning("%s cannot be listed: %s", folder, error)
        return []


def _files_below(path: Path) -> Iterator[Path]:
    """A file, or the files of a folder; links are not followed."""
    if path.is_symlink() or not path.is_dir():
        yield path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            yield Path(folder) / name


def _size(path: str | Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
