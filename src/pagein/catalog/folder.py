"""Files of a model folder: opened under its root only, links out of it are not followed (rule 9)."""

from __future__ import annotations

from pathlib import Path

from pagein.catalog.bounded import bad
from pagein.errors import BadModelFile

MOST_FILES = 4096
"""Entries of a folder that are looked at; a model has a few hundred at most."""


def root_of(folder: Path) -> Path:
    """Return what a link in a model folder may point into: the folder itself.

    In the cache of the Hugging Face hub, ``<repository>/snapshots/<revision>`` consists of links into
    ``<repository>/blobs``; there the repository's folder is the root.
    """
    real = folder.resolve()
    if real.parent.name == "snapshots" and (real.parent.parent / "blobs").is_dir():
        return real.parent.parent
    return real


def inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; raises BadModelFile where the name or a link leads out of it."""
    if not name or name in (".", "..") or "/" in name or "\\" in name or "\0" in name:
        raise bad(folder, f"names the file {name[:200]!r}, which is not a plain file name")
    path = folder / name
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise bad(folder, f"has no file {name!r}") from error
    if not real.is_relative_to(root_of(folder)):
        raise bad(path, "is a link out of its folder, which is not followed")
    return path


def files_in(folder: Path) -> list[str]:
    """Return the names of the regular files of a folder, sorted; links out of it are left out."""
    names: list[str] = []
    try:
        for count, entry in enumerate(folder.iterdir()):
            if count == MOST_FILES:
                raise bad(folder, f"has more than {MOST_FILES} entries")
            if _is_file_inside(folder, entry):
                names.append(entry.name)
    except OSError as error:
        raise bad(folder, f"cannot be listed: {error.strerror}") from error
    return sorted(names)


def _is_file_inside(folder: Path, entry: Path) -> bool:
    try:
        return entry.is_file() and inside(folder, entry.name) is not None
    except BadModelFile:
        return False
