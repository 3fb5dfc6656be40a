"""PEFT folders as parts: names, scaling, and what is refused because it would compute something else."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

import pytest

from pagein.errors import BadModelFile, ModelUnsuited
from pagein.parts.splitting.peft import adapter_digest, read_adapter
from tests.parts.build import safetensors

Q = "base_model.model.layers.0.q_proj"


def folder(path: Path, names: dict[str, tuple[int, int]] | None = None, **config: object) -> Path:
    """Write an adapter of rank 4 whose tensors are zeros."""
    header, end = {}, 0
    for name, shape in (names or {f"{Q}.lora_A.weight": (4, 8), f"{Q}.lora_B.weight": (6, 4)}).items():
        size = 4 * shape[0] * shape[1]
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    path.mkdir()
    (path / "adapter_model.safetensors").write_bytes(safetensors(header, bytes(end)))
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8, "r": 4, **config}))
    return path


def scaling(path: Path) -> float:
    (found,) = [one for name, one in read_adapter(path, "p").items() if name.endswith(".scaling")]
    return struct.unpack("<d", b"".join(found.chunks()))[0]


def test_names_and_scaling(tmp_path):
    """A LoRA is two matrices and one number for each layer, under the part's name; files have digests."""
    found = read_adapter(folder(tmp_path / "a"), "mail.adapter", "models.m.")
    stem = "mail.adapter/models.m.layers.0.q_proj"
    assert {name: one.shape for name, one in found.items()} == {
        f"{stem}.lora_A.weight": (4, 8),
        f"{stem}.lora_B.weight": (6, 4),
        f"{stem}.scaling": (1,),
    }
    assert set(adapter_digest(tmp_path / "a")) == {"adapter_config.json", "adapter_model.safetensors"}


def test_scaling_follows_the_settings(tmp_path):
    """alpha / rank; alpha / √rank with rsLoRA; another alpha for the modules that a pattern names."""
    assert scaling(folder(tmp_path / "a")) == 2.0
    assert scaling(folder(tmp_path / "b", use_rslora=True)) == 8 / math.sqrt(4)
    assert scaling(folder(tmp_path / "c", alpha_pattern={"q_proj": 2})) == 0.5
    assert scaling(folder(tmp_path / "d", alpha_pattern={"proj": 2})) == 2.0


def test_a_layer_trained_whole_stands_in(tmp_path):
    """What was trained whole (modules_to_save) comes under its own name."""
    found = read_adapter(folder(tmp_path / "a", {"base_model.model.score.weight": (3, 8)}), "p")
    assert list(found) == ["p/score.weight"]


@pytest.mark.parametrize(
    "config",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"lora_bias": True},
        {"bias": "all"},
        {"lora_alpha": "8"},
        {"alpha_pattern": {"(": 1}},
    ],
)
def test_other_kinds_are_refused(tmp_path, config):
    """What would compute something else than the LoRA that is known is refused by name."""
    with pytest.raises(ModelUnsuited):
        read_adapter(folder(tmp_path / "a", **config), "p")


@pytest.mark.parametrize("name", ["base_model.model.embed.lora_embedding_A", "q.lora_A.weight"])
def test_other_tensors_are_refused(tmp_path, name):
    """Tensors that no linear layer's LoRA has are refused by name."""
    with pytest.raises(ModelUnsuited, match="none of a LoRA"):
        read_adapter(folder(tmp_path / "a", {name: (2, 2)}), "p")


def test_pickles_have_no_way_in(tmp_path):
    """An adapter_model.bin is not looked at, also where it is the only file."""
    path = folder(tmp_path / "a")
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(BadModelFile, match=r"adapter_model\.safetensors"):
        read_adapter(path, "p")
