"""tune kv: settings from what a model and a machine gave, printed, and written only where it was said."""

from __future__ import annotations

import importlib.util
import json

import pytest
import yaml

from pagein.cli import tune_kv
from pagein.cli.disk_trial import DiskTest

MIB, GIB = 1024**2, 1024**3
MODEL = {
    "event": "measured",
    "bytes_per_token": 23_040,
    "window_bytes": 0,
    "side_layers": 0,
    "context": 8192,
    "prefill": [[64, 0.13], [256, 0.5], [1024, 2.1]],
    "copy_bps": 5e9,
    "device": "cpu",
    "device_free": None,
    "resident_bytes": 600 * MIB,
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Take the place of the model's process and of the disk; returns what the process was asked and a model folder."""
    asked = []

    def events(module, arguments, what):
        asked.append(arguments)
        yield {"event": "progress", "what": "computing 64 tokens"}
        yield dict(MODEL)

    monkeypatch.setattr(tune_kv, "need_torch", lambda what: None)
    monkeypatch.setattr(tune_kv, "open_checkpoint", lambda folder: None)
    monkeypatch.setattr(tune_kv, "events", events)
    monkeypatch.setattr(tune_kv, "measure_disk", lambda folder: DiskTest(0.5e9, 2e9, "ext4", "so"))
    (tmp_path / "model").mkdir()
    (tmp_path / "kv").mkdir()
    return asked


def test_settings_curve_and_reasons_are_printed(pagein, machine):
    """What was measured, from where each tier pays, each setting with its reason, and lines of YAML."""
    result = pagein("tune", "kv", "model", "--memory", "1GiB", "--disk", "kv")
    assert result.exit_code == 0, result.output
    assert "model: 22 KiB of KV a token" in result.stdout
    assert "disk gives 2.00 GB/s" in result.stdout
    assert "disk beats computing anew from 64 tokens on" in result.stdout
    assert "● computed anew" in result.stdout
    assert "⣀" in result.stdout or "⠤" in result.stdout or "⠊" in result.stdout
    assert "as many of 2048 tokens as the rest holds" in result.stdout


def test_the_printed_lines_are_yaml_with_the_settings_names(pagein, machine):
    """They can be copied under `options` as they are."""
    result = pagein("tune", "kv", "model", "--memory", "1GiB")
    lines = result.stdout[result.stdout.index("kv:\n") :]
    settings = yaml.safe_load(lines)["kv"]
    assert settings["memory"] == "1024MiB"
    assert (settings["active"], settings["max_tokens"]) == (4, 8192)
    assert "pinned_share" not in settings


def test_it_says_that_no_lower_tier_was_measured(pagein, machine):
    """Without --disk there is nothing to compare with on a CPU."""
    assert "no lower tier was measured" in pagein("tune", "kv", "model").stdout


def test_settings_are_written_where_it_is_said_and_nowhere_else(pagein, machine, tmp_path):
    """A configuration beside it is never touched."""
    (tmp_path / "pagein.yaml").write_text("budget: 1GiB\n")
    result = pagein("tune", "kv", "model", "--memory", "1GiB", "--write", "kv.yaml")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load((tmp_path / "kv.yaml").read_text())["kv"]["active"] == 4
    assert (tmp_path / "pagein.yaml").read_text() == "budget: 1GiB\n"
    assert {path.name for path in tmp_path.iterdir()} == {"model", "kv", "kv.yaml", "pagein.yaml"}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--write", "pagein.yaml"), "is there already"),
        (("--write", "gone/kv.yaml"), "no folder"),
        (("--disk", "gone"), "no folder gone"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is_measured(pagein, machine, tmp_path, args, words):
    """Minutes of measuring are not thrown away for a path."""
    (tmp_path / "pagein.yaml").write_text("budget: 1GiB\n")
    result = pagein("tune", "kv", "model", *args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert machine == []


def test_a_png_needs_matplotlib_before_anything_is_measured(pagein, machine, monkeypatch):
    """The install line, and no minute lost."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = pagein("tune", "kv", "model", "--png", "curve.png")
    assert result.exit_code != 0
    assert "pip install 'pagein[plot]'" in result.stderr
    assert machine == []


def test_json_has_measurements_settings_and_curve(pagein, machine):
    """Programs get numbers, and where each tier begins to pay."""
    body = json.loads(pagein("tune", "kv", "model", "--memory", "1GiB", "--disk", "kv", "--json").stdout)
    assert body["measured"]["bytes_per_token"] == 23_040
    assert body["pays_from_tokens"] == {"disk": 64}
    assert body["settings"]["active"] == 4
    assert body["curve"]["from disk"][0][0] == 64


def test_a_device_is_passed_on(pagein, machine):
    """The model is measured where it will run."""
    pagein("tune", "kv", "model", "--device", "cpu")
    assert machine == [["model", "--device", "cpu"]]
