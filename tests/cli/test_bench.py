"""bench: a disk measured in several ways, on the weights that are there or on a file of its own."""

from __future__ import annotations

import json
import os
from collections import namedtuple

import pytest

from pagein.cli import bench_disk
from pagein.weights.reading.disk import Measured, ReadMode

MIB = 1024 * 1024


@pytest.fixture
def measured(monkeypatch):
    """Take the disk's place with fixed speeds; return the files that were to be read, each with its size."""
    asked = []

    def measure(files, setting, buffer, nbytes, start, longest=0.0):
        asked.append([(file.name, file.stat().st_size) for file in files])
        direct = setting.mode is ReadMode.DIRECT
        return None if direct and setting.threads == 1 else Measured(3e9 if direct else 1e9, 0.02 if direct else 0.4)

    monkeypatch.setattr(bench_disk, "measure", measure)
    return asked


def test_the_table_marks_the_way_that_is_taken(pagein, measured, tmp_path):
    """Each way has its speed and its cost, one is taken, and the reason follows."""
    (tmp_path / "model.gguf").write_bytes(b"x" * MIB)
    result = pagein("bench", "disk", "model.gguf")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["direct", "4", "16.0", "MiB", "3", "0.02", "taken"] in rows
    assert ["direct", "1", "16.0", "MiB", "refused"] in rows
    assert ["buffered", "1", "16.0", "MiB", "1", "0.4"] in rows
    assert "Pagein takes direct reads, 4 reads of 16.0 MiB at a time: on " in result.stdout


def test_json_has_every_figure(pagein, measured, tmp_path):
    """Programs get bytes and seconds, and null for what was refused."""
    (tmp_path / "model.gguf").write_bytes(b"x" * MIB)
    body = json.loads(pagein("bench", "disk", "model.gguf", "--json").stdout)
    assert body["chosen"]["mode"] == "direct"
    assert body["chosen"]["bytes_per_second"] == 3e9
    first = {"mode": "direct", "threads": 1, "chunk_bytes": 16 * MIB}
    assert body["results"][0] == {**first, "bytes_per_second": None, "cpu_seconds_per_gb": None}


def test_a_real_file_is_really_measured(pagein, tmp_path):
    """The whole way, from a file to speeds above 0."""
    (tmp_path / "model.gguf").write_bytes(os.urandom(MIB))
    result = pagein("bench", "disk", "model.gguf", "--json")
    assert result.exit_code == 0, result.output
    speeds = [one["bytes_per_second"] for one in json.loads(result.stdout)["results"]]
    assert len(speeds) == 9
    assert all(speed is None or speed > 0 for speed in speeds)


def test_a_folder_is_read_where_its_weights_lie(pagein, measured, monkeypatch, tmp_path):
    """Large weight files count, each once, wherever below the folder; small and other files do not."""
    monkeypatch.setattr(bench_disk, "_LEAST_FILE", 1000)
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshots").mkdir()
    (tmp_path / "blobs" / "one.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "blobs" / "small.safetensors").write_bytes(b"x" * 999)
    (tmp_path / "blobs" / "notes.txt").write_bytes(b"x" * 5000)
    (tmp_path / "snapshots" / "link.safetensors").symlink_to(tmp_path / "blobs" / "one.safetensors")
    result = pagein("bench", "disk", str(tmp_path))
    assert "1000 B in 1 file," in result.stdout
    assert {size for files in measured for _, size in files} == {1000}
    assert {len(files) for files in measured} == {1}


def test_a_folder_without_weights_gets_a_file_that_is_removed(pagein, measured, monkeypatch, tmp_path):
    """What is written for the measurement is gone afterwards, also when the measurement breaks."""
    monkeypatch.setattr(bench_disk, "_LEAST_SIZE", MIB)
    (tmp_path / "d").mkdir()
    assert pagein("bench", "disk", "d", "--size", "1MiB").exit_code == 0
    ((name, size),) = measured[0]
    assert name.startswith(".pagein-bench-")
    assert size == 9 * MIB
    assert list((tmp_path / "d").iterdir()) == []

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_disk, "measure", broken)
    assert pagein("bench", "disk", "d", "--size", "1MiB").exit_code == 130
    assert list((tmp_path / "d").iterdir()) == []


def test_space_is_checked_before_anything_is_written(pagein, measured, monkeypatch, tmp_path):
    """A disk that is nearly full is not filled for a measurement; the error has both numbers."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(bench_disk.shutil, "disk_usage", lambda path: usage(0, 0, 700 * MIB))
    result = pagein("bench", "disk", str(tmp_path), "--size", "64MiB")
    assert result.exit_code == 15
    assert "1.6 GiB" in result.stderr
    assert "700.0 MiB" in result.stderr or "700 MiB" in result.stderr
    assert measured == []


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("gone",), "there is no file or folder gone"),
        (("empty",), "empty is empty"),
        (("empty", "--size", "1MiB"), "too fast to be measured"),
        (("empty", "--size", "much"), "--size: not a size"),
    ],
)
def test_what_cannot_be_measured_is_refused(pagein, measured, tmp_path, args, words):
    """A wrong path or size is a usage error, before anything is read."""
    (tmp_path / "empty").touch()
    result = pagein("bench", "disk", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert measured == []
