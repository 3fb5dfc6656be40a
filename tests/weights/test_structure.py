"""What is found of a model without its weights, and which models are refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from pagein.errors import BadModelFile, DoesNotFit, ModelUnsuited
from pagein.weights.reading.checkpoint import open_checkpoint
from pagein.weights.reading.sources import find_sources
from pagein.weights.streaming.structure import build

pytestmark = pytest.mark.torch


def copy_with(folder: Path, to: Path, **changes: Any) -> Path:
    shutil.copytree(folder, to)
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps({**config, **changes}))
    return to


def test_blocks_are_found_without_a_list_of_architectures(make_model: Any) -> None:
    """Decoder-only models have one stack, encoder-decoders two; tied heads are told."""
    llama, t5 = (build(open_checkpoint(make_model(kind))) for kind in ("llama-tied", "t5"))
    assert [len(stack) for stack in llama.stacks] == [6]
    assert [len(stack) for stack in t5.stacks] == [3, 3]
    assert llama.tied
    assert all(parameter.device.type == "meta" for parameter in llama.model.parameters())


def test_buffers_are_computed(make_model: Any) -> None:
    """Rotary frequencies are those of an ordinary load."""
    import transformers

    folder = make_model("llama")
    full = transformers.AutoModelForCausalLM.from_pretrained(folder)
    made = dict(build(open_checkpoint(folder)).model.named_buffers())
    assert made
    assert all(torch.equal(made[name], buffer) for name, buffer in full.named_buffers())


def test_a_model_with_code_of_its_own_is_refused(make_model: Any, tmp_path: Path) -> None:
    """auto_map is never followed."""
    folder = copy_with(make_model("llama"), tmp_path / "m", auto_map={"AutoModelForCausalLM": "evil.Model"})
    with pytest.raises(ModelUnsuited, match="code of its own"):
        build(open_checkpoint(folder))


def test_a_checkpoint_of_other_sizes_is_refused_with_both_shapes(make_model: Any, tmp_path: Path) -> None:
    """A config that does not belong to the weights is told by the first tensor's shapes."""
    checkpoint = open_checkpoint(copy_with(make_model("llama"), tmp_path / "m", intermediate_size=96))
    with pytest.raises(BadModelFile, match=r"\[64, 128\], the model of config.json wants \[64, 96\]"):
        find_sources(build(checkpoint).model, checkpoint)


def test_a_missing_tensor_is_named(make_model: Any, tmp_path: Path) -> None:
    """A block that the checkpoint does not have is a refusal, not a random initialisation."""
    checkpoint = open_checkpoint(copy_with(make_model("llama"), tmp_path / "m", num_hidden_layers=7))
    with pytest.raises(BadModelFile, match=r"model\.layers\.6\."):
        find_sources(build(checkpoint).model, checkpoint)


def test_too_little_memory_is_refused_with_the_least_that_would_do(make_model: Any) -> None:
    """Nothing is loaded, and the message has both numbers."""
    from pagein import AutoModel
    from tests.weights.conftest import SPEED

    with pytest.raises(DoesNotFit, match=r"needs at least .* the memory given is 1\.0 MiB"):
        AutoModel.from_pretrained(make_model("llama"), memory="1MiB", speed=SPEED, verbose=False)


def test_what_a_streamed_model_cannot_do_is_said(make_model: Any, load: Any, tmp_path: Path) -> None:
    """Saving, training, moving and casting are refused in words; where it computes is told right."""
    model = load(make_model("llama"), 0.5)
    assert model.device.type == "cpu"
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.to("cpu") is model
    asks = [lambda: model.save_pretrained(tmp_path), model.train]
    asks += [lambda: model.to("meta"), lambda: model.to(torch.float64)]
    for ask in asks:
        with pytest.raises(ModelUnsuited, match="streamed"):
            ask()
    assert model.eval() is model


def test_a_call_beyond_the_planned_cache_is_refused(make_model: Any, load: Any) -> None:
    """A prompt of more tokens than memory is kept for raises before it computes, with both numbers."""
    from pagein.errors import ContextTooLong

    model = load(make_model("llama"), 0.5, context=16, batch=1)
    with pytest.raises(ContextTooLong, match="17 tokens, memory is kept for 16"):
        model(torch.zeros(1, 17, dtype=torch.long))


def test_a_placeholder_never_computes(make_model: Any, load: Any) -> None:
    """A streamed block's weights are on meta outside its turn."""
    model = load(make_model("llama"), 0.3)
    away = [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]
    assert any("layers" in name for name in away)
    with torch.inference_mode():
        model(torch.zeros(1, 3, dtype=torch.long))
    assert [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"] == away
