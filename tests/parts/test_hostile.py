"""What lies under a part's name and is not its file is refused unread, with one audit line (scenario 16)."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from pagein.catalog.split.root import PartsRoot
from pagein.errors import PartRefused, UnknownPart, UnknownTask
from pagein.parts.files.part_file import Limits, PartReader
from tests.parts.bench import Bench
from tests.parts.build import split


@pytest.fixture
def bench(tmp_path):
    """The small model's split."""
    return Bench(tmp_path, split(tmp_path))


# ── what is asked for ───────────────────────────────────────────────────────────────────────────────

ASKED = {
    "a task that is not there": ("translate", "tag", UnknownTask),
    "a path as task": ("../../etc/passwd", "tag", UnknownTask),
    "a task with NUL": ("tag\0", "tag", UnknownTask),
    "a task with a line end": ("tag\n", "tag", UnknownTask),
    "a task of look-alikes": ("t\u0430g", "tag", UnknownTask),
    "a task with a long s": ("ſummarize", "summarize", UnknownTask),
    "an endless task": ("t" * 10_000_000, "tag", UnknownTask),
    "a part that is not there": ("tag", "more", UnknownPart),
    "an absolute path as part": ("tag", "/etc/passwd", UnknownPart),
    "a file as part": ("tag", "tag-0f40348a3a8d.safetensors", UnknownPart),
    "another task's part": ("tag", "summarize", PartRefused),
}


@pytest.mark.parametrize("asked", ASKED)
def test_only_what_the_plan_has_is_opened(bench, asked):
    """A request names a task and a part of that task; nothing else reaches the disk."""
    task, part, kind = ASKED[asked]
    bench.refuse(task, part, kind=kind)
    assert bench.bytes_read == 0
    assert bench.room.most == 0


def test_a_precision_that_is_not_there(bench):
    """No other precision is taken in its place."""
    bench.refuse("tag", "tag", "int4", kind=UnknownPart)


# ── what lies under the name ────────────────────────────────────────────────────────────────────────


def replaced(make):
    """Put something else under the name of the file."""

    def spoil(path: Path) -> None:
        data = path.read_bytes()
        path.unlink()
        make(path, data)

    return spoil


def linked(path: Path, data: bytes) -> None:
    other = path.parent / "elsewhere"
    other.write_bytes(data)
    path.symlink_to(other)


def linked_folder(path: Path, data: bytes) -> None:
    other = path.parent / "folder"
    other.mkdir()
    path.symlink_to(other, target_is_directory=True)


def hard_linked(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    os.link(path, path.parent / "another")


def bound(path: Path, data: bytes) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # an address has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


NAMES = {
    "gone": (lambda path: path.unlink(), "No such file"),
    "a link to a file": (replaced(linked), "is a link"),
    "a link to nowhere": (replaced(lambda path, data: path.symlink_to("nowhere")), "is a link"),
    "a link to itself": (replaced(lambda path, data: path.symlink_to(path.name)), "is a link"),
    "a link to a folder": (replaced(linked_folder), "is a link"),
    "a link to a device": (replaced(lambda path, data: path.symlink_to("/dev/zero")), "is a link"),
    "a hard link": (replaced(hard_linked), "has 2 names"),
    "a named pipe": (replaced(lambda path, data: os.mkfifo(path)), "is a named pipe"),
    "a socket": (replaced(bound), "is a socket"),
    "a folder": (replaced(lambda path, data: path.mkdir()), "is a folder"),
    "empty": (lambda path: path.write_bytes(b""), "is empty, the plan says"),
    "a byte more": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "the plan says"),
    "another part's file": (
        lambda path: path.write_bytes(next(path.parent.glob("summarize-*")).read_bytes()),
        "the plan says",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_what_is_not_the_file_is_not_read(bench, case):
    """Links, pipes, sockets, folders and files of another size are refused before a byte is read or reserved."""
    spoil, words = NAMES[case]
    spoil(bench.file("tag"))
    assert words in bench.refuse().message
    assert bench.bytes_read == 0
    assert bench.room.most == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a device")
def test_a_device_is_not_opened(bench):
    """A device under the name is refused unopened."""
    path = bench.file("tag")
    path.unlink()
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    except OSError:
        pytest.skip("no right to make devices")
    assert "is a device" in bench.refuse().message
    assert bench.bytes_read == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_a_stranger_s_file_is_refused(bench):
    """A file of a user who is neither this one, root, nor the folder's owner is not trusted."""
    os.chown(bench.file("tag"), 12345, -1)
    assert "belongs to user 12345" in bench.refuse().message


def test_permission_denied(bench, monkeypatch):
    """A file that may not be opened is refused with the system's reason."""
    whole = os.open

    def deny(path, *rest, **options):
        if str(path).startswith("tag-"):
            raise PermissionError(13, "Permission denied")
        return whole(path, *rest, **options)

    monkeypatch.setattr(os, "open", deny)
    assert "Permission denied" in bench.refuse().message


@pytest.mark.parametrize("tenth", range(10))
def test_a_cut_file_is_refused_unread(bench, tenth):
    """Cut anywhere, as by a power cut in mid-write, a file is refused by its size."""
    path = bench.file("summarize")
    size = path.stat().st_size
    os.truncate(path, size * tenth // 10)
    told = bench.refuse("summarize", "summarize")
    assert told.details["planned_bytes"] == size
    assert bench.bytes_read == 0


def test_a_folder_that_is_exchanged_later_has_no_effect(bench, tmp_path_factory):
    """The root is held open: what its path comes to mean afterwards is not looked at."""
    with PartsRoot(bench.folder) as root:
        aside = bench.folder.rename(bench.folder.with_name(f"{bench.folder.name}-aside"))
        bench.folder.symlink_to(tmp_path_factory.mktemp("other"))
        loaded = PartReader(root, bench.plan).read("tag", "tag", "stored", bench.room)
        loaded.close()
        bench.folder.unlink()
        aside.rename(bench.folder)


def test_a_file_that_is_exchanged_while_it_is_opened(bench, monkeypatch):
    """What was looked at is what is opened, or nothing is."""
    whole, path = os.open, bench.file("tag")

    def exchange(name, *rest, **options):
        if name == path.name:
            path.rename(path.with_name("aside"))
            path.write_bytes((bench.folder / "aside").read_bytes())
        return whole(name, *rest, **options)

    monkeypatch.setattr(os, "open", exchange)
    assert "was replaced while it was opened" in bench.refuse().message


def test_a_part_above_the_limit_is_not_opened(bench):
    """A part larger than the limit is refused by the plan alone; the backbone is as large as models are."""
    bench.options["limits"] = Limits(nbytes=100)
    told = bench.refuse()
    assert told.details["limit"] == 100
    assert bench.room.most == 0
    bench.read("tag", "backbone").close()


def test_no_room_is_found_before_reading(bench):
    """A reservation that is refused costs no read, and is the caller's own error."""
    told = PartRefused("x", "no room")

    def full(nbytes: int):
        raise told

    bench.room = full
    with pytest.raises(PartRefused) as caught:
        bench.read()
    assert caught.value is told
    assert bench.bytes_read == 0
    assert len(bench.lines) == 1
