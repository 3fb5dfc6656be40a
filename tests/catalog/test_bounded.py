"""Bounded reads and folders: the ground that all header readers stand on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pagein.catalog.bounded import BLOCK, BoundedFile, parse_object, read_json
from pagein.catalog.folder import files_in, inside
from pagein.errors import BadModelFile
from tests.catalog.build import write


def test_reads_any_place_and_never_past_the_end(tmp_path: Path) -> None:
    """Reads forward, backward and across blocks give the file's bytes; one past the end names both numbers."""
    data = bytes(i % 251 for i in range(3 * BLOCK))
    with BoundedFile(write(tmp_path / "f", data)) as file:
        for offset, count in ((0, 8), (8, 8), (BLOCK - 4, 8), (2 * BLOCK, BLOCK), (5, 3), (3 * BLOCK, 0)):
            assert file.at(offset, count, "it") == data[offset : offset + count]
        with pytest.raises(BadModelFile, match=f"it ends at byte {3 * BLOCK + 1}, the file has {3 * BLOCK}"):
            file.at(3 * BLOCK - 1, 2, "it")
        with pytest.raises(BadModelFile):
            file.at(-1, 2, "it")


def test_a_single_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A length inside a large file is still no reason to allocate it."""
    monkeypatch.setattr("pagein.catalog.bounded.LARGEST_READ", 100)
    with BoundedFile(write(tmp_path / "f", bytes(1000))) as file, pytest.raises(BadModelFile, match="101 bytes"):
        file.at(0, 101, "it")


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    """A folder, a pipe and a missing file are refused without blocking."""
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", "gone", ""):
        with pytest.raises(BadModelFile):
            BoundedFile(tmp_path / name)
    with pytest.raises(BadModelFile, match="cannot be opened"):
        BoundedFile(tmp_path / "a\0b")


def test_a_file_that_shrinks_is_named(tmp_path: Path) -> None:
    """What was there when the file was opened and is not any more gives an error, not a loop."""
    path = write(tmp_path / "f", bytes(100))
    with BoundedFile(path) as file:
        os.truncate(path, 10)
        with pytest.raises(BadModelFile, match="shortened"):
            file.at(50, 4, "it")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1, "a": 2}', "'a' comes twice"),
        ("[1]", "holds a JSON list"),
        ("{", "not valid JSON"),
        ('{"a":' * 5000, "not valid JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
    ],
)
def test_json_is_strict(tmp_path: Path, text: str | bytes, words: str) -> None:
    """Double keys, other values than objects, endless nesting and numbers are BadModelFile."""
    with pytest.raises(BadModelFile, match=words):
        parse_object(tmp_path, text.encode() if isinstance(text, str) else text)


def test_json_is_bounded_before_it_is_parsed(tmp_path: Path) -> None:
    """Size and number of items are checked on the bytes."""
    path = write(tmp_path / "f", '{"a": [' + "[]," * 1000 + "[]]}")
    with pytest.raises(BadModelFile, match="the limit is 100"):
        read_json(path, 100)
    with pytest.raises(BadModelFile, match="items, the limit is 500"):
        read_json(path, 10_000, most_items=500)
    assert len(read_json(path, 10_000)["a"]) == 1001


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "/etc/passwd", "a\\b", "a\0b"])
def test_only_plain_names_are_inside(tmp_path: Path, name: str) -> None:
    """A name with a path in it is refused, whether or not it leads out."""
    with pytest.raises(BadModelFile, match="not a plain file name"):
        inside(tmp_path, name)


def test_links_out_of_a_folder_are_not_followed(tmp_path: Path) -> None:
    """A link inside the folder is a file of it, one that leads out is refused and not listed."""
    folder = tmp_path / "model"
    write(folder / "a", b"a")
    (folder / "near").symlink_to("a")
    (folder / "far").symlink_to(write(tmp_path / "secret", b"s"))
    (folder / "loop").symlink_to("loop")
    (folder / "sub").mkdir()
    assert files_in(folder) == ["a", "near"]
    assert inside(folder, "near") == folder / "near"
    with pytest.raises(BadModelFile, match="link out of its folder"):
        inside(folder, "far")
    with pytest.raises(BadModelFile, match="has no file"):
        inside(folder, "loop")


def test_the_hubs_cache_links_into_its_own_blobs(tmp_path: Path) -> None:
    """In a Hugging Face cache a snapshot consists of links into the repository's blobs; those are followed."""
    repository = tmp_path / "models--a--b"
    snapshot = repository / "snapshots" / "123"
    write(repository / "blobs" / "x", b"x")
    snapshot.mkdir(parents=True)
    (snapshot / "model.onnx").symlink_to("../../blobs/x")
    (snapshot / "other").symlink_to(write(tmp_path / "y", b"y"))
    assert files_in(snapshot) == ["model.onnx"]


def test_a_folder_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of entries looked at is bounded."""
    monkeypatch.setattr("pagein.catalog.folder.MOST_FILES", 2)
    for name in "abc":
        write(tmp_path / name, b"")
    with pytest.raises(BadModelFile, match="more than 2 entries"):
        files_in(tmp_path)
