"""Models without weights: what their classes compute for themselves is as it is in an ordinary construction."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from pagein.parts.building import parameters_on_meta

pytestmark = pytest.mark.torch

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
GROUPED = {**TEXT, "num_key_value_heads": 2}
PICTURES = {**{name: size for name, size in TEXT.items() if name != "vocab_size"}, "image_size": 32, "patch_size": 8}
SPEECH = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "vocab_size": 100} | {
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "pad_token_id": 0,
}  # fmt: skip
LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", {**GROUPED, "rope_parameters": LONG, "tie_word_embeddings": True}),
    "Gemma2ForCausalLM": ("Gemma2Config", {**GROUPED, "head_dim": 8}),
    "MixtralForCausalLM": ("MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "DeepseekV3ForCausalLM": (
        "DeepseekV3Config",
        {**TEXT, "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 2}
        | {"topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    ),
    "GPT2LMHeadModel": ("GPT2Config", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}),
    "BertForPreTraining": ("BertConfig", TEXT),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 100},
    ),
    "BartForConditionalGeneration": ("BartConfig", SPEECH),
    "WhisperForConditionalGeneration": ("WhisperConfig", {**SPEECH, "eos_token_id": 2, "decoder_start_token_id": 1}),
    "ViTForImageClassification": ("ViTConfig", PICTURES),
    "ResNetForImageClassification": ("ResNetConfig", {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8}),
}


def tied(model: Any) -> list[list[str]]:
    """Names of the same parameter."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return sorted(found for found in names.values() if len(found) > 1)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_classes_compute_for_themselves_is_there(name, dtype):
    """Buffers, persistent ones too, bit for bit; types and ties of parameters; and no parameter has bytes."""
    config_class, given = MODELS[name]
    config = getattr(transformers, config_class)(**given)
    build = getattr(transformers, name)._from_config
    whole = build(copy.deepcopy(config), dtype=getattr(torch, dtype))
    with parameters_on_meta():
        empty = build(copy.deepcopy(config), dtype=getattr(torch, dtype))
    assert all(one.is_meta for one in empty.parameters())
    found = dict(empty.named_buffers(remove_duplicate=False))
    wanted = dict(whole.named_buffers(remove_duplicate=False))
    assert found.keys() == wanted.keys()
    for key, buffer in wanted.items():
        assert found[key].dtype == buffer.dtype, key
        assert torch.equal(found[key], buffer), key
    assert tied(empty) == tied(whole)
    kinds = [
        {key: (one.dtype, one.shape, one.requires_grad) for key, one in model.named_parameters(remove_duplicate=False)}
        for model in (empty, whole)
    ]
    assert kinds[0] == kinds[1]
