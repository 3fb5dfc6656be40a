"""The identity of weight files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagein.catalog.identity import CHUNK, ENDS, Stamp, digest
from pagein.errors import BadModelFile
from tests.catalog.build import write

SMALL = 1000
LARGE = 2 * ENDS + 80 * CHUNK


class Memory:
    """A cache in a dictionary that counts questions it could answer."""

    def __init__(self) -> None:
        self.known: dict[Stamp, str] = {}
        self.hits = 0

    def cached_digest(self, stamp: Stamp) -> str | None:
        """Look it up."""
        self.hits += stamp in self.known
        return self.known.get(stamp)

    def remember_digest(self, stamp: Stamp, digest: str) -> None:
        """Keep it."""
        self.known[stamp] = digest


@pytest.mark.parametrize("size", [0, SMALL, LARGE])
def test_the_same_bytes_have_the_same_identity(tmp_path: Path, size: int) -> None:
    """Name, place and time do not matter."""
    first, second = write(tmp_path / "a", bytes(size)), write(tmp_path / "x" / "b", bytes(size))
    os.utime(second, (1, 1))
    assert digest([first]) == digest([second])
    assert len(digest([first])) == 64


@pytest.mark.parametrize(("size", "place"), [(SMALL, 500), (LARGE, 0), (LARGE, LARGE - 1), (LARGE, ENDS + 10)])
def test_other_bytes_have_another(tmp_path: Path, size: int, place: int) -> None:
    """A byte at the start, at the end or in a sample changes the identity, and so does the size."""
    data = bytearray(size)
    path = write(tmp_path / "a", bytes(data))
    before = digest([path])
    data[place] = 1
    assert digest([write(path, bytes(data))]) != before
    assert digest([write(path, bytes(size + 1))]) != before


def test_all_files_of_a_model_count(tmp_path: Path) -> None:
    """A second file changes the identity; the order of naming them does not."""
    one, two = write(tmp_path / "1", b"a"), write(tmp_path / "2", b"b")
    assert digest([one, two]) == digest([two, one]) != digest([one])


def test_an_unchanged_file_is_hashed_once(tmp_path: Path) -> None:
    """Path, size, time and inode together are trusted; a change of any hashes anew."""
    cache, path = Memory(), write(tmp_path / "a", b"one")
    first = digest([path], cache)
    assert digest([path], cache) == first
    assert cache.hits == 1
    write(path, b"two")
    os.utime(path, ns=(5, 5))
    assert digest([path], cache) != first
    assert cache.hits == 1


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    """A file that went away is a BadModelFile."""
    with pytest.raises(BadModelFile, match="cannot be read"):
        digest([tmp_path / "gone"])
