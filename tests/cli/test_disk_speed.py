"""The disk's speed: given, remembered, or measured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagein.cli import disk_speed as module
from pagein.cli.disk_speed import disk_speed, format_speed, parse_speed
from pagein.errors import BadUsage


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[Path]]:
    """Count the measurements, each twice as fast as the one before, and keep what is remembered in an empty folder."""
    seen: list[list[Path]] = []

    def probe(files: list[Path]) -> SimpleNamespace:
        seen.append(list(files))
        return SimpleNamespace(bytes_per_second=1e9 * 2 ** len(seen), why="direct reads were faster")

    monkeypatch.setattr("pagein.weights.reading.disk.probe", probe)
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name: str(tmp_path / "cache" / name))
    return seen


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Write a file on some disk."""
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"weights")
    return path


def test_a_given_speed_is_taken(probes, file):
    """Nothing is measured where the speed is given."""
    assert disk_speed([file], "1.5GB/s").bytes_per_second == 1.5e9
    assert disk_speed([file], "2GiB").source == "given"
    assert not probes


def test_measured_once_and_remembered(probes, file):
    """The first question measures and says how, later ones do not; `measure` does it again."""
    first = disk_speed([file], None)
    assert (first.bytes_per_second, first.source) == (2e9, "measured now: direct reads were faster")
    again = disk_speed([file], None)
    assert again.bytes_per_second == 2e9
    assert again.source.startswith("measured before")
    assert disk_speed([file], "measure").bytes_per_second == 4e9
    assert disk_speed([file], None).bytes_per_second == 4e9
    assert probes == [[file], [file]]


def test_what_is_old_is_measured_again(probes, file, monkeypatch):
    """A month later the disk may be another one."""
    disk_speed([file], None)
    later = module.time() + 31 * 86_400
    monkeypatch.setattr(module, "time", lambda: later)
    assert disk_speed([file], None).bytes_per_second == 4e9


@pytest.mark.parametrize("text", ["", "[]", "{", '{"1": 5}', '{"1": {"speed": "x", "at": 0}}'])
def test_a_broken_memory_is_measured_anew(probes, file, tmp_path, text):
    """A file that cannot be read is as good as none, and is replaced."""
    path = tmp_path / "cache" / "pagein" / "disk-speed.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert disk_speed([file], None).bytes_per_second == 2e9
    assert json.loads(path.read_text())


def test_a_folder_that_cannot_be_written_only_costs_a_measurement(probes, file, tmp_path):
    """Where nothing can be remembered the speed is measured every time."""
    (tmp_path / "cache").write_text("in the way")
    assert disk_speed([file], None).bytes_per_second == 2e9
    assert disk_speed([file], None).bytes_per_second == 4e9


@pytest.mark.parametrize("text", ["fast", "", "-1GB/s", "0", "0GB/s"])
def test_wrong_speeds(text):
    """What is no speed is refused."""
    with pytest.raises(BadUsage, match="--disk"):
        parse_speed(text)


def test_speeds_for_people():
    """Speeds are printed in the units of the sizes beside them."""
    assert format_speed(1.5 * 1024**3) == "1.5 GiB/s"
