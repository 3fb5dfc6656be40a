"""Settings that waste memory: each is named, with what it wastes and what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.kv.cache.geometry import Geometry, Group, LayerShape
from pagein.kv.cache.safe import unsafe_settings
from pagein.kv.tiers.pool import KvPool

pytestmark = pytest.mark.torch
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
LAYERS = tuple(LayerShape(index, 2, 16, 16, torch.bfloat16, None) for index in range(2))
GEOMETRY = Geometry((Group("full", None, LAYERS),), (), 2)


@pytest.fixture
def model() -> Any:
    """A model as it should be."""
    made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, dtype="bfloat16")).to(torch.bfloat16)
    return made.eval().requires_grad_(False)


def the_one(model: Any, *parts: str, **told: Any) -> None:
    """Exactly one sentence, and it has all these parts."""
    (sentence,) = unsafe_settings(model, **told)
    for part in parts:
        assert part in sentence, sentence


def test_a_model_as_it_should_be_has_nothing_to_say(model):
    """Warnings that always come are read by nobody."""
    assert unsafe_settings(model, geometry=GEOMETRY, tokeniser=SimpleNamespace(padding_side="left")) == []


def test_train_mode(model):
    """Dropout has no place in an answer."""
    the_one(model.train(), "train mode", "model.eval()")


def test_gradient_checkpointing(model):
    """It turns the cache off, for a backward pass that never comes."""
    model.gradient_checkpointing_enable()
    the_one(model, "gradient checkpointing is on", "gradient_checkpointing_disable()")


def test_autograd_tells_bytes_a_token_and_inference_mode_ends_it(model):
    """2 layers of 64 values of 2 bytes are the least that a forward keeps of a token."""
    model.requires_grad_(True)
    the_one(model, "autograd is on", "256 B", "inference_mode")
    with torch.no_grad():
        assert unsafe_settings(model) == []


def test_held_gradients_are_told_in_bytes(model):
    """They are as large as the weights that they belong to."""
    weight = model.lm_head.weight.requires_grad_(True)
    weight.grad = torch.zeros_like(weight)
    with torch.no_grad():
        the_one(model, "gradients are held: 125 KiB", "zero_grad")


@pytest.mark.parametrize("owner", ["config", "generation_config"])
def test_no_cache(model, owner):
    """Wherever it is switched off."""
    getattr(model, owner).use_cache = False
    the_one(model, f"{owner}.use_cache is off", "set it to True")


def test_a_cache_of_transformers_own_beside_ours(model):
    """A static cache is as large as the longest text from the first token on."""
    generation = transformers.GenerationConfig(cache_implementation="static", max_length=640)
    told = {"generation_config": generation, "geometry": GEOMETRY}
    the_one(model, "cache_implementation is 'static'", "160 KiB more at 640 tokens", "None", **told)


def test_a_static_cache_that_generate_left_behind(model):
    """transformers keeps it on the model for the next call: two caches in memory."""
    layer = SimpleNamespace(keys=torch.zeros(1024, dtype=torch.uint8), values=torch.zeros(1024, dtype=torch.uint8))
    model._cache = SimpleNamespace(layers=[layer, layer])
    the_one(model, "second cache", "4 KiB", "model._cache")


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("output_hidden_states", "384 B a token"),
        ("output_scores", "4 KiB a token"),
        ("output_logits", "4 KiB a token"),
        ("output_attentions", "64 KiB a token at 4096 tokens"),
    ],
)
def test_outputs_that_generate_keeps(model, name, size):
    """They count only where generate returns them at all."""
    generation = transformers.GenerationConfig(return_dict_in_generate=True, **{name: True})
    the_one(model, f"generation_config.{name} is on", size, generation_config=generation)
    generation.return_dict_in_generate = False
    assert unsafe_settings(model, generation) == []


def test_outputs_that_every_forward_keeps(model):
    """The model's own configuration counts without generate."""
    model.config.output_hidden_states = True
    the_one(model, "config.output_hidden_states is on", "384 B")


def test_a_model_widened_to_float32_doubles_its_kv(model, tmp_path):
    """Loading in another dtype overwrites the configuration, so the checkpoint's own file is read."""
    model.save_pretrained(tmp_path)
    wide = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).requires_grad_(False)
    the_one(wide, "the checkpoint is bfloat16, model and KV are float32", "256 B a token", geometry=GEOMETRY)
    same = transformers.LlamaForCausalLM.from_pretrained(tmp_path, dtype="auto").requires_grad_(False)
    assert unsafe_settings(same) == []


def test_eager_attention_writes_out_every_score(model):
    """4 heads × 4096² × 2 bytes."""
    model.set_attn_implementation("eager")
    the_one(model, "'eager'", "128 MiB for 4096 tokens", "sdpa")


@pytest.mark.parametrize("name", ["num_beams", "num_return_sequences"])
def test_rows_that_copy_a_prompt(model, name):
    """A stock cache copies what they share."""
    generation = transformers.GenerationConfig(do_sample=True, **{name: 4})
    the_one(model, f"{name} is 4", "4.0 MiB at 4096 tokens", generation_config=generation, geometry=GEOMETRY)


def test_padding_on_the_right(model):
    """Pads between prompt and answer."""
    the_one(model, "pads on the right", "'left'", tokeniser=SimpleNamespace(padding_side="right"))


def test_generate_switches_autograd_off_by_itself(model):
    """A pool whose caches go to generate has nothing to warn of."""
    model.requires_grad_(True)
    assert unsafe_settings(model, generates=True) == []


def test_a_pool_warns_once_of_each_at_its_start(model):
    """The setting is named where the pool is made."""
    with pytest.warns(UserWarning, match="train mode"):
        KvPool(model.train(), memory="1MiB").close()


def test_a_pool_for_a_model_as_it_should_be_is_silent(model, recwarn):
    """Nothing is warned of that is as it should be."""
    KvPool(model, memory="1MiB").close()
    assert [str(one.message) for one in recwarn if one.category is UserWarning] == []
