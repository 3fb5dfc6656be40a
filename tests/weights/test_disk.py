"""The probe: what it reads, which way of reading it takes, and what it says about odd file systems."""

from __future__ import annotations

import errno
import fcntl
import os

import pytest

from pagein.errors import WeightsUnreadable
from pagein.memory.buffers import Buffer
from pagein.weights.reading import disk
from pagein.weights.reading.disk import (
    BUFFER,
    SETTINGS,
    Measured,
    ReadMode,
    Setting,
    choose,
    file_system,
    measure,
    probe,
)
from pagein.weights.reading.files import PAGE, WeightFile

MIB = 1024 * 1024
DIRECT, WIDE, STREAM, WIDE_STREAM = SETTINGS


@pytest.fixture
def files(tmp_path):
    """Three files, of which one ends within a page."""
    made = [tmp_path / name for name in ("a", "b", "c")]
    for path, size in zip(made, (MIB, 2 * MIB + 77, 3 * MIB), strict=True):
        path.write_bytes(os.urandom(size))
    return made


@pytest.fixture
def read(monkeypatch):
    """Note every read as (file, offset, bytes)."""
    seen, real = [], WeightFile.read

    def noted(self, into, offset, needed):
        got = real(self, into, offset, needed)
        seen.append((self.path, offset, got))
        return got

    monkeypatch.setattr(WeightFile, "read", noted)
    return seen


@pytest.fixture
def refused(monkeypatch):
    """Let the file system refuse O_DIRECT, as FUSE and old tmpfs do."""
    real = fcntl.fcntl

    def refusing(fd, command, value=0):
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refusing)


def speeds(direct, wide, stream, wide_stream):
    """Return what a probe found, in GB/s."""
    found = zip(SETTINGS, (direct, wide, stream, wide_stream), strict=True)
    return {setting: Measured(speed * 1e9, 0.1) for setting, speed in found if speed is not None}


@pytest.mark.parametrize(
    ("found", "taken"),
    [
        (speeds(2, 2, 2, 2), DIRECT),
        (speeds(2, 2.2, 2.2, 2.2), DIRECT),
        (speeds(0.5, 2.4, 0.5, 1), WIDE),
        (speeds(1, 1, 2, 2), STREAM),
        (speeds(1, 1, 1, 5), WIDE_STREAM),
        (speeds(None, None, 1, 1), STREAM),
    ],
)
def test_the_cheapest_way_is_taken_unless_another_is_clearly_faster(found, taken):
    """Noise decides nothing; direct reads leave memory and processor to the model."""
    chosen = choose(found, "ext4")
    assert (chosen.mode, chosen.threads, chosen.chunk) == (taken.mode, taken.threads, taken.chunk)
    assert chosen.bytes_per_second == found[taken].bps


@pytest.mark.parametrize(
    ("found", "kind", "words"),
    [
        (
            speeds(2, 2, 1, 1),
            "ext4",
            "on ext4 direct reads give 2.00 GB/s for 0.1 s of processor time per GB; .* slower",
        ),
        (speeds(0.05, None, 0.09, None), "nfs4", "on nfs4 direct reads give 50 MB/s .* cache gives 90 MB/s .* faster"),
        (speeds(None, None, 1, 1), "fuse.sshfs", "fuse.sshfs refuses direct reads"),
        (speeds(None, None, 1, 1), "tmpfs", "tmpfs keeps files in memory"),
        (speeds(None, None, 1, 1), None, "this file system refuses direct reads"),
    ],
)
def test_the_reason_names_file_system_and_both_speeds(found, kind, words):
    """Whoever waits for a slow disk can see what was measured (scenario 19)."""
    from re import search

    chosen = choose(found, kind)
    assert search(words, chosen.why), chosen.why


def test_the_speed_of_the_chosen_mode_is_that_of_the_chosen_way():
    """Nobody is promised the speed of a way that is not taken."""
    chosen = choose(speeds(2, 2.4, 1, 1.2), "ext4")
    assert (chosen.bytes_per_second, chosen.direct_bps, chosen.buffered_bps) == (2e9, 2e9, 1.2e9)


def test_a_way_that_was_not_measured_has_no_speed():
    """Unknown is None."""
    chosen = choose(speeds(None, None, 1, 2), "nfs")
    assert chosen.direct_bps is None
    assert chosen.buffered_bps == 2e9


def test_a_probe_reads_real_bytes_within_its_budget(files, read):
    """It measures on the files themselves, each way at another place, and no more than it may."""
    found = probe(files, 5 * MIB)
    assert found.bytes_per_second > 0
    assert found.buffered_bps is not None
    assert sum(got for *_, got in read) <= 5 * MIB + len(SETTINGS) * 2 * PAGE
    assert len({(path, offset) for path, offset, _ in read}) > 3


def test_refused_direct_reads_leave_the_page_cache(files, refused):
    """A file system without O_DIRECT is measured and used in the other way, and that is said."""
    found = probe(files, 4 * MIB)
    assert found.mode is ReadMode.BUFFERED
    assert found.direct_bps is None
    assert "refuses direct reads" in found.why


def test_files_in_memory_are_not_read_directly(files, monkeypatch):
    """On tmpfs a direct read, where it is allowed at all, measures nothing."""
    monkeypatch.setattr(disk, "file_system", lambda path: "tmpfs")
    found = probe(files, 4 * MIB)
    assert (found.mode, found.direct_bps) == (ReadMode.BUFFERED, None)


def test_a_slow_disk_is_not_asked_for_every_way(files, monkeypatch):
    """Where one way took its time, those that only more threads tell from it are left out."""
    asked = []

    def slow(files, setting, *_):
        asked.append(setting)
        return Measured(20e6, 0.1)

    monkeypatch.setattr(disk, "measure", slow)
    monkeypatch.setattr(disk, "file_system", lambda path: "ext4")
    assert probe(files).bytes_per_second == 20e6
    assert asked == [DIRECT, DIRECT, STREAM]


def test_what_is_measured_wraps_around_the_files(files, read):
    """Less than asked for behind the starting place is made up from the beginning, across all files."""
    buffer = Buffer(BUFFER)
    assert measure(files, Setting(ReadMode.BUFFERED, 1, MIB), buffer, 4 * MIB, 0.75) is not None
    buffer.close()
    assert [path.name for path, *_ in read] == ["c", "c", "a", "b", "b"]
    assert sum(got for *_, got in read) >= 4 * MIB


def test_empty_files_cannot_be_measured(tmp_path):
    """There is an error instead of a speed of 0."""
    (tmp_path / "none").touch()
    with pytest.raises(WeightsUnreadable, match="is empty"):
        probe([tmp_path / "none"])


def test_the_file_system_is_that_of_the_nearest_mount(tmp_path):
    """Of nested mounts the deepest counts, of two at one place the later; blanks in names are escaped."""
    (tmp_path / "a b" / "deep").mkdir(parents=True)
    point = str(tmp_path / "a b").replace(" ", r"\040")
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "20 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n"
        f"21 20 0:5 / {point} rw - nfs4 server:/x rw\n"
        f"22 20 0:6 / {point} rw master:2 shared:3 - fuse.sshfs host: rw\n"
        f"23 20 0:7 / {point}x rw - xfs /dev/sdb rw\n"
    )
    assert file_system(tmp_path / "a b" / "deep", mounts) == "fuse.sshfs"
    assert file_system(tmp_path, mounts) == "ext4"
    assert file_system(tmp_path, tmp_path / "missing") is None
