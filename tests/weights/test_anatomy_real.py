"""The parts told by names are those of the model that transformers builds, and the cache is the one that it keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pagein.weights.planning.anatomy import dissect
from pagein.weights.planning.needs import read_needs
from pagein.weights.reading.checkpoint import open_checkpoint

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOKENS = 16
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
SPARSE = {**SMALL, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "an untied decoder": ("LlamaConfig", {**SMALL, "tie_word_embeddings": False}),
    "a tied decoder": ("Qwen3Config", {**SMALL, "head_dim": 16, "tie_word_embeddings": True}),
    "sliding windows": ("Gemma2Config", {**SMALL, "head_dim": 16}),
    "fused projections": ("Phi3Config", {**SMALL, "pad_token_id": 0}),
    "positions in a table": ("GPT2Config", {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512}),
    "experts of a list": ("Qwen3MoeConfig", SPARSE),
    "fused experts": ("GptOssConfig", {**SMALL, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "latent attention": ("DeepseekV3Config", LATENT),
    "an encoder-decoder": (
        "T5Config",
        {"d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 4, "d_kv": 16, "vocab_size": 512},
    ),
}


@pytest.fixture(params=CASES, ids=str)
def model(request: pytest.FixtureRequest) -> Any:
    """Build a small model of each kind."""
    kind, settings = CASES[request.param]
    torch.manual_seed(0)
    auto = transformers.AutoModelForSeq2SeqLM if kind == "T5Config" else transformers.AutoModelForCausalLM
    return auto.from_config(getattr(transformers, kind)(**settings), dtype=torch.bfloat16).eval()


def test_parts_are_those_of_the_modules(model: Any, tmp_path: Path) -> None:
    """Stacks, embedding, head and tying are what `structure` finds in the module tree."""
    from pagein.weights.streaming.structure import build

    model.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    parts, real = dissect(checkpoint), build(checkpoint)
    told = sorted([block.name for block in stack] for stack in parts.stacks)
    assert told == sorted([block.name for block in stack] for stack in real.stacks)
    assert parts.tied == real.tied
    assert parts.head is not None
    assert real.head is not None
    assert parts.head.shape == tuple(real.head[1].weight.shape)
    assert {table.shape for table in parts.embeddings} == {tuple(table.weight.shape) for _, table in real.embeddings}


def test_the_cache_is_as_large_as_told(model: Any, tmp_path: Path) -> None:
    """The bytes of the cache after a pass are those predicted for so many tokens."""
    model.save_pretrained(tmp_path)
    needs = read_needs(open_checkpoint(tmp_path), context=TOKENS).needs
    words = torch.zeros(1, TOKENS, dtype=torch.long)
    more = {"decoder_input_ids": words} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        cache = model(input_ids=words, use_cache=True, **more).past_key_values
    halves = [cache.self_attention_cache, cache.cross_attention_cache] if model.config.is_encoder_decoder else [cache]
    kept = [tensor for half in halves for layer in half.layers for tensor in (layer.keys, layer.values)]
    assert needs.kv == sum(tensor.numel() * tensor.element_size() for tensor in kept)
