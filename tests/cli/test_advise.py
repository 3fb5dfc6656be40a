"""plan --memory: advice on a folder of safetensors, without a daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.catalog.build import gguf, write
from tests.parts.build import split
from tests.weights.headers import LLAMA, llama, mixture, write_folder
from typer.testing import Result

GIB = 1024**3
SCALE = 64
"""Widths of 4096 and 16384: four blocks of 480 MiB each, of holes."""


@pytest.fixture
def advise(pagein: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Ask for advice where memory gives 10 GiB/s, the disk is known to give 1 GiB/s and has 100 GiB free."""
    monkeypatch.setattr("pagein.cli.advise.measure_memory", lambda cores: 10.0 * GIB)
    monkeypatch.setattr("pagein.cli.advise.shutil.disk_usage", lambda path: SimpleNamespace(free=100 * GIB))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda model, memory, *rest: pagein("plan", str(model), "--memory", memory, *rest)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Write a decoder of 1.9 GiB whose weights are holes."""
    config = {**LLAMA, "hidden_size": 64 * SCALE, "intermediate_size": 256 * SCALE}
    return write_folder(tmp_path / "big", llama(scale=SCALE), config)


def test_every_way_with_its_figures(advise, model):
    """The table has memory, bytes per token, seconds and new disk of each way, and the divisions behind them."""
    result = advise(model, "2GiB", "--disk", "1GiB/s")
    assert result.exit_code == 0
    out = result.stdout
    assert "1.9 GiB of weights" in out
    assert "disk: 1.0 GiB/s (given), 100 GiB free" in out
    for way in ("load whole as stored", "load whole in 8 bits", "load whole in 4 bits"):
        assert way in out
    stream = next(line for line in out.splitlines() if "stream as stored" in line)
    assert stream.split()[3:7] == ["1.5", "GiB", "1.4", "GiB"]
    assert "disk: 1.4 GiB / 1.0 GiB/s = 1.4 s beside memory: 1.9 GiB / 10.0 GiB/s = 188 ms" in stream


def test_recommends_one_way_and_prints_its_plan(advise, model):
    """One way is marked and its plan printed, with the reason."""
    out = advise(model, "2GiB", "--disk", "1GiB/s").stdout
    assert [line.split("  ")[0] for line in out.splitlines() if line.startswith("→")] == ["→ load whole in 8 bits"]
    assert "recommended: load whole in 8 bits: reads nothing, 94 ms a token, the fastest way" in out
    assert "all 4 blocks resident" in out


def test_a_full_load_where_it_fits(advise, model):
    """What fits is loaded as it is."""
    out = advise(model, "4GiB", "--disk", "1GiB/s").stdout
    assert "recommended: load whole as stored: it fits whole as it is" in out


def test_gives_up_with_an_exit_code(advise, model):
    """Where nothing fits the advice is to give up, with both numbers, and scripts see it."""
    result = advise(model, "500MiB", "--disk", "1GiB/s")
    assert result.exit_code == 5
    assert "→ give up" in result.stdout
    assert "nothing fits: the least is stream in 4 bits with 798 MiB, given are 500 MiB" in result.stdout


def test_json_for_programs(advise, model):
    """The same figures as JSON, in bytes and seconds."""
    body = json.loads(advise(model, "2GiB", "--disk", "1GiB/s", "--json").stdout)
    assert body["recommended"] == "load whole in 8 bits"
    stream = next(way for way in body["ways"] if way["name"] == "stream as stored")
    read = stream["read_bytes_per_token"] / body["disk_bytes_per_second"]
    assert read <= stream["seconds_per_token"] <= read + stream["compute_seconds"]
    assert stream["resident_blocks"] + stream["read_bytes_per_token"] / (480 * 1024**2) == pytest.approx(4, abs=0.01)
    assert body["memory_bytes"] == 2 * GIB


def test_context_and_batch_take_memory(advise, model):
    """A longer context and more sequences are said, and raise what every way needs."""
    usual = json.loads(advise(model, "2GiB", "--disk", "1GiB/s", "--json").stdout)
    long = json.loads(advise(model, "2GiB", "--disk", "1GiB/s", "--context", "8192", "--batch", "4", "--json").stdout)
    assert (usual["context"], usual["batch"]) == (2048, 1)
    grown = [
        after["least_memory_bytes"] - before["least_memory_bytes"]
        for before, after in zip(usual["ways"], long["ways"], strict=True)
    ]
    assert min(grown) >= (4 * 8192 - 2048) * 32_768


def test_a_mixture_reads_its_active_experts(advise, tmp_path):
    """A model with routed experts is planned with a cache for them."""
    config = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 2}
    folder = write_folder(tmp_path / "moe", mixture(fused=True), config)
    out = advise(folder, "1GiB", "--disk", "1GiB/s").stdout
    assert "experts: 288 KiB of 288 KiB cached; a token uses 72 KiB, reads 0 B" in out


def test_experts_are_read_after_what_chooses_them(advise, tmp_path):
    """The time of experts that are not cached is added, not hidden, and the table says so."""
    config = {**LLAMA, "num_experts": 8, "num_experts_per_tok": 4, "hidden_size": 64}
    shapes = mixture(fused=True)
    shapes |= {name: (8, 4096, 4096) for name in shapes if ".experts." in name}
    folder = write_folder(tmp_path / "moe", shapes, config)
    result = advise(folder, "1GiB", "--disk", "1GiB/s", "--json")
    stream = next(way for way in json.loads(result.stdout)["ways"] if way["name"] == "stream as stored")
    # all of it is experts: only the read of the small dense part runs beside computing
    assert stream["seconds_per_token"] == pytest.approx(stream["compute_seconds"] + stream["read_seconds"], rel=0.01)
    assert ", then experts from disk: " in advise(folder, "1GiB", "--disk", "1GiB/s").stdout


def test_a_configured_model_by_its_name(advise, model, tmp_path):
    """The name of a configured model stands for its folder."""
    (tmp_path / "pagein.yaml").write_text(f"models:\n  large:\n    model: {model}\n")
    assert "1.9 GiB of weights" in advise("large", "2GiB", "--disk", "1GiB/s").stdout
    missing = advise("small", "2GiB")
    assert missing.exit_code == 4
    assert "configured: large" in missing.stderr


def test_a_file_of_the_folder_stands_for_it(advise, model):
    """A safetensors file means the folder around it."""
    assert advise(model / "model.safetensors", "2GiB", "--disk", "1GiB/s").exit_code == 0


def test_a_quantised_model_is_refused_by_name(advise, tmp_path):
    """What comes quantised cannot be streamed, and the method is named."""
    config = {**LLAMA, "quantization_config": {"quant_method": "gptq"}}
    result = advise(write_folder(tmp_path / "q", llama(), config), "2GiB")
    assert result.exit_code == 3
    assert "GPTQ" in result.stderr


def test_what_is_not_floats_is_not_packed(advise, tmp_path):
    """Blocks of another kind of number have no ways in fewer bits."""
    out = advise(write_folder(tmp_path / "q", llama(), LLAMA, dtype="F8_E4M3"), "2GiB", "--disk", "1GiB/s").stdout
    assert "not packed in fewer bits" in out
    assert "in 8 bits" not in out


@pytest.mark.parametrize("as_folder", [False, True])
def test_other_formats_are_refused_by_name(advise, tmp_path, as_folder):
    """A GGUF file, or a folder with one, is no folder of safetensors: the error says so and where its figures are."""
    file = write(tmp_path / "chat" / "m.gguf", gguf({"general.architecture": "llama"}, [("w", (32,), 0)]))
    result = advise(file.parent if as_folder else file, "2GiB")
    assert result.exit_code == 2
    assert "is gguf; this advice is for folders of safetensors" in result.stderr
    assert "'pagein check'" in result.stderr


def test_a_split_model_is_refused_by_name(advise, tmp_path):
    """Its parts come and go: it is no folder whose weights are streamed."""
    split(tmp_path / "office")
    result = advise(tmp_path / "office", "2GiB")
    assert result.exit_code == 2
    assert "is split; this advice is for folders of safetensors" in result.stderr


def test_a_folder_without_a_config_is_refused(advise, model):
    """Weights alone do not tell the model."""
    (model / "config.json").unlink()
    result = advise(model, "2GiB")
    assert result.exit_code == 3
    assert "no config.json" in result.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--memory", "much"), "--memory: not a size"),
        (("--memory", "2GiB", "--disk", "fast"), "--disk: not a size"),
        (("--memory", "2GiB", "--disk", "0"), "0 bytes per second"),
        (("--disk", "1GB/s"), "are for advice"),
        (("--context", "100"), "are for advice"),
    ],
)
def test_wrong_options(pagein, model, options, words):
    """A wrong size or an option without --memory is refused in one line."""
    result = pagein("plan", str(model), *options)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_folder_without_memory(pagein, model, nowhere):
    """Who names a folder and no memory is told what to add, not that no daemon answers."""
    result = pagein("plan", str(model))
    assert result.exit_code == 2
    assert "is a folder, no model of a daemon's configuration" in result.stderr
    assert f"pagein plan {model} --memory 8GiB" in " ".join(result.stderr.split())


def test_no_folder_and_no_configuration(advise):
    """A name that is neither a folder nor configured is refused with the file that could have named it."""
    result = advise("nothing", "2GiB")
    assert result.exit_code == 2
    assert "no folder 'nothing', and no configuration pagein.yaml" in result.stderr
