"""init: models found in a folder become a configuration that loads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from tests.parts.build import split

from pagein.cli.find_models import DEEPEST, SMALLEST, find_models
from pagein.config.load import load_settings


def gguf(path: Path, size: int = SMALLEST) -> None:
    """Write a GGUF file with one tensor of that many bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def text(words: str) -> bytes:
        return struct.pack("<Q", len(words)) + words.encode()

    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("w") + struct.pack("<IQIQ", 1, size // 4, 0, 0)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(size))


def test_writes_a_configuration_that_loads(pagein, tmp_path):
    """Each model found gets a name and its path; the file is a valid configuration."""
    gguf(tmp_path / "models" / "Tiny Chat_v2.gguf")
    gguf(tmp_path / "models" / "other" / "model.gguf")
    result = pagein("init", "models")
    assert result.exit_code == 0
    assert "wrote pagein.yaml with 2 models; next: pagein check pagein.yaml" in result.stdout
    settings = load_settings(tmp_path / "pagein.yaml", {})
    assert {name: model.model for name, model in settings.models.items()} == {
        "tiny-chat_v2": tmp_path / "models" / "Tiny Chat_v2.gguf",
        "other": tmp_path / "models" / "other" / "model.gguf",
    }


def test_paths_inside_are_relative(pagein, tmp_path):
    """Paths below the configuration's folder are relative to it, so that both can be moved together."""
    gguf(tmp_path / "models" / "a.gguf")
    (tmp_path / "etc").mkdir()
    pagein("init", "models")
    pagein("init", "models", "-o", "etc/pagein.yaml")
    assert "model: models/a.gguf\n" in (tmp_path / "pagein.yaml").read_text()
    assert f"model: {tmp_path}/models/a.gguf\n" in (tmp_path / "etc" / "pagein.yaml").read_text()


def test_refuses_to_overwrite(pagein, tmp_path):
    """An existing configuration stays as it is unless --force is given."""
    (tmp_path / "pagein.yaml").write_text("budget: 1GiB\n")
    result = pagein("init")
    assert result.exit_code == 2
    assert "pagein.yaml is there already" in result.stderr
    assert "--force" in result.stderr
    assert (tmp_path / "pagein.yaml").read_text() == "budget: 1GiB\n"
    assert pagein("init", "--force").exit_code == 0
    assert "budget: 1GiB" not in (tmp_path / "pagein.yaml").read_text()


def test_nothing_found(pagein, tmp_path):
    """A folder without models gives a file that loads and says so."""
    result = pagein("init")
    assert result.exit_code == 0
    assert "found no model" in result.stdout
    assert load_settings(tmp_path / "pagein.yaml", {}).models == {}


def test_missing_folder(pagein):
    """A folder that is not there is named, with exit code 2."""
    result = pagein("init", "nowhere")
    assert result.exit_code == 2
    assert "'nowhere'" in result.stderr


def test_unwritable_output(pagein, tmp_path):
    """A file that cannot be written is one readable line."""
    result = pagein("init", "-o", "not/there.yaml")
    assert result.exit_code == 2
    assert "cannot be written: No such file or directory" in result.stderr


def test_damaged_files_are_named(pagein, tmp_path):
    """What looks like a model and is none is skipped with its reason; the others are written."""
    gguf(tmp_path / "good.gguf")
    (tmp_path / "bad.gguf").write_bytes(b"GGUF" + bytes(2))
    result = pagein("init")
    assert "wrote pagein.yaml with 1 model;" in result.stdout
    assert "skipped: " in result.stderr
    assert "bad.gguf" in result.stderr


def test_json(pagein, tmp_path):
    """--json has what was found and what was skipped."""
    gguf(tmp_path / "good.gguf")
    gguf(tmp_path / "small" / "small.gguf", 64)
    body = json.loads(pagein("init", "--json").stdout)
    assert [model["name"] for model in body["models"]] == ["good"]
    assert body["models"][0]["weight_bytes"] == SMALLEST
    assert list(body["skipped"]) == ["small/small.gguf"]


def test_weights_without_a_config(pagein, tmp_path):
    """Safetensors that no config.json explains are named, not written."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [2**14], "data_offsets": [0, 2**16]}}).encode()
    (tmp_path / "m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(2**16))
    result = pagein("init")
    assert "found no model" in result.stdout
    assert "m.safetensors: has no config.json beside it" in result.stderr


def test_depth_is_bounded(tmp_path):
    """Folders deeper than the bound are not looked at."""
    inside = tmp_path.joinpath(*"abcdefgh"[:DEEPEST])
    gguf(inside / "seen.gguf")
    gguf(inside / "deeper" / "unseen.gguf")
    assert [found.name for found in find_models(tmp_path).found] == ["seen"]


def test_links_to_folders_are_not_followed(tmp_path):
    """A link to a folder, which may lead round in a circle, is not entered."""
    gguf(tmp_path / "a" / "one.gguf")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert len(find_models(tmp_path).found) == 1


def test_search_is_bounded(tmp_path, monkeypatch):
    """A search that passes its bounds ends and says so."""
    monkeypatch.setattr("pagein.cli.find_models.MOST_MODELS", 2)
    for number in range(5):
        gguf(tmp_path / str(number) / f"m{number}.gguf")
    search = find_models(tmp_path)
    assert len(search.found) == 3
    assert search.cut is not None


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("hub/models--org--Tiny-LM/snapshots/0123456789abcdef0123456789abcdef01234567/model.gguf", "tiny-lm"),
        ("pkg/assets/model.gguf", "pkg"),
        ("x/Model-é-Q4.gguf", "model-q4"),
        ("x/123.gguf", "123"),
    ],
)
def test_names(tmp_path, path, name):
    """The name is the file's own, or the nearest folder's where the file's says nothing."""
    gguf(tmp_path / path)
    assert [found.name for found in find_models(tmp_path).found] == [name]


def test_names_are_unique(pagein, tmp_path):
    """Two models of the same name get different ones, and names that YAML would take for numbers are quoted."""
    gguf(tmp_path / "a" / "1e3.gguf")
    gguf(tmp_path / "b" / "1e3.gguf")
    pagein("init")
    assert list(load_settings(tmp_path / "pagein.yaml", {}).models) == ["1e3", "1e3-2"]


def test_a_split_model_is_found_as_one(pagein, tmp_path):
    """Its plan makes a folder of parts one model, whose tasks are named."""
    split(tmp_path / "models" / "office")
    assert pagein("init", "models").exit_code == 0
    text = (tmp_path / "pagein.yaml").read_text()
    assert "office:  # split, " in text
    assert "tasks embed summarize tag" in text
    settings = load_settings(tmp_path / "pagein.yaml", {})
    assert [model.model for model in settings.models.values()] == [tmp_path / "models" / "office"]


def test_a_split_that_never_ended_is_named(pagein, tmp_path):
    """Parts without their plan are no models, one by one or together."""
    split(tmp_path / "models" / "office")
    (tmp_path / "models" / "office" / "split_plan.json").unlink()
    result = pagein("init", "models")
    assert "found no model" in result.stdout
    assert "its split is not finished" in result.stderr
