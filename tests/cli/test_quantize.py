"""quantize, shard: a process with torch does the work; its steps, errors and exit codes are shown as one's own."""

from __future__ import annotations

import importlib.util
import json

import pytest

from pagein.cli import making
from pagein.errors import BadModelFile, DiskFull

FORECAST = {
    "event": "forecast", "shards": 3, "packed": 2, "original_bytes": 4096, "total_bytes": 2048, "need_bytes": 2048,
    "free_bytes": 1024**3,
}  # fmt: skip
SHARD = {"event": "shard", "file": "0.safetensors", "nbytes": 9, "kept": False, "done_bytes": 9, "total_bytes": 9}


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Return a function that sets what the process says and how it ends, and returns one that reads its arguments."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)

    def says(*events, code=0):
        lines = "\n".join(json.dumps(event) for event in events)
        path = tmp_path / "said_by_a_process.py"
        path.write_text(
            f"import json, sys\njson.dump(sys.argv[1:], open({str(tmp_path / 'arguments.json')!r}, 'w'))\n"
            f"print({lines!r})\nsys.exit({code})\n"
        )
        monkeypatch.setattr(making, "MODULE", path.stem)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return lambda: json.loads((tmp_path / "arguments.json").read_text())

    return says


def test_options_reach_the_process(pagein, child):
    """What was asked for is what the process is told; the forecast and the end are printed."""
    arguments = child(FORECAST, SHARD, {"event": "deleted", "files": 1, "bytes": 4096}, {"event": "made", "packed": 2})
    result = pagein("quantize", "model", "--bits", "8", "--group", "32", "--out", "out", "--delete-original")
    assert result.exit_code == 0, result.stderr
    assert arguments() == ["model", "--out", "out", "--bits", "8", "--group", "32", "--delete-original"]
    assert "3 shards, 2 KiB in all of 4 KiB, 2 weights packed; to write: 2 KiB (2048 bytes)" in result.stdout
    assert "made out; the original was deleted, which freed 4 KiB" in result.stdout


def test_shard_packs_nothing(pagein, child):
    """The command without compression names no bits."""
    arguments = child(FORECAST)
    assert pagein("shard", "model", "--out", "out", "--dry-run", "--allow-pickle").exit_code == 0
    assert arguments() == ["model", "--out", "out", "--dry-run", "--allow-pickle"]


def test_json_for_programs(pagein, child):
    """With --json the last of each kind of step is printed as JSON and nothing else."""
    child(FORECAST, SHARD, {"event": "made", "packed": 2})
    found = json.loads(pagein("quantize", "model", "--out", "out", "--json").stdout)
    assert found["forecast"]["need_bytes"] == 2048
    assert set(found) == {"forecast", "shard", "made"}


@pytest.mark.parametrize("kind", [BadModelFile, DiskFull])
def test_errors_are_the_processes(pagein, child, kind):
    """An error of the process is shown with its hint, and ends with its own exit code."""
    child(FORECAST, {"event": "error", "code": kind.code, "message": "what went wrong", "hint": "what to do"}, code=3)
    result = pagein("quantize", "model", "--out", "out")
    assert result.exit_code == kind.exit_code
    assert "error: what went wrong" in result.stderr
    assert "hint: what to do" in result.stderr


def test_a_process_that_ends_without_a_word(pagein, child):
    """A process that was killed is an error, and the hint says that the next run goes on."""
    child(FORECAST, code=9)
    result = pagein("quantize", "model", "--out", "out")
    assert result.exit_code == 1
    assert "ended with exit code 9" in result.stderr
    assert "goes on" in result.stderr


def test_without_torch_the_extra_is_named(pagein, monkeypatch):
    """Where torch is missing the extra that brings it is named, and nothing is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else name)
    result = pagein("quantize", "model", "--out", "out")
    assert result.exit_code == 9
    assert "pip install 'pagein[torch]'" in result.stderr


@pytest.mark.parametrize("option", [["--bits", "3"], ["--group", "16"]])
def test_other_sizes_are_refused(pagein, option):
    """Bits and groups that no kernel computes are refused at once."""
    result = pagein("quantize", "model", "--out", "out", *option)
    assert result.exit_code == 2
    assert "4 or 8" in result.stderr
