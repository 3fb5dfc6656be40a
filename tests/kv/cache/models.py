"""Small models of real architectures with random weights, and what stock caches make of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import transformers as t
from transformers import DynamicCache

from pagein.kv.cache.tiered import TieredCache

t.logging.set_verbosity_error()
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 1024,
}
FOUR = {**SMALL, "num_hidden_layers": 4}
MIXED = ["sliding_attention", "full_attention"]
KINDS: dict[str, Callable[[], Any]] = {
    "llama": lambda: t.LlamaConfig(**SMALL),
    "qwen2": lambda: t.Qwen2Config(**SMALL),
    "gpt2": lambda: t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=128, bos_token_id=0, eos_token_id=1),
    "mixtral": lambda: t.MixtralConfig(**SMALL, num_local_experts=4),
    "deepseek": lambda: t.DeepseekV3Config(
        **{**SMALL, "num_key_value_heads": 4}, moe_intermediate_size=32, n_routed_experts=8, num_experts_per_tok=2,
        n_group=2, topk_group=1, q_lora_rank=32, kv_lora_rank=16, qk_rope_head_dim=16, qk_nope_head_dim=16,
        v_head_dim=16, first_k_dense_replace=1,
    ),
    "gemma2": lambda: t.Gemma2Config(**SMALL, head_dim=8, sliding_window=16),
    "gemma3": lambda: t.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=100, layer_types=MIXED),
    "gemma3-short": lambda: t.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=8, layer_types=MIXED),
    "gemma3n": lambda: t.Gemma3nTextConfig(
        **{**FOUR, "num_hidden_layers": 6, "intermediate_size": [64] * 6}, head_dim=8, sliding_window=16,
        num_kv_shared_layers=2, vocab_size_per_layer_input=128, hidden_size_per_layer_input=8, layer_types=MIXED * 3,
        activation_sparsity_pattern=[0.0] * 6, laurel_rank=8, altup_num_inputs=2,
    ),
    "llama4": lambda: t.Llama4TextConfig(
        **FOUR, head_dim=8, num_local_experts=2, intermediate_size_mlp=64, attention_chunk_size=32
    ),
    "jamba": lambda: t.JambaConfig(
        **{**FOUR, "num_hidden_layers": 8}, num_experts=4, use_mamba_kernels=False, mamba_d_state=8
    ),
    "qwen3-next": lambda: t.Qwen3NextConfig(
        **FOUR, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        shared_expert_intermediate_size=32, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "t5": lambda: t.T5Config(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=128, decoder_start_token_id=0
    ),
    "bart": lambda: t.BartConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, vocab_size=128,
    ),
}  # fmt: skip


@functools.cache
def model_of(kind: str, dtype: str = "float32") -> Any:
    """Return a model of a kind that never stops by itself."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = KINDS[kind]()
    auto = t.AutoModelForSeq2SeqLM if config.is_encoder_decoder else t.AutoModelForCausalLM
    model = auto.from_config(config).to(getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.forced_eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt(tokens: int, rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Return token ids [rows, tokens] that are never padding."""
    return torch.randint(3, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def stock(model: Any) -> Any:
    """Return what `generate` would make by itself."""
    config = model.config.get_text_config(decoder=True)
    cache = DynamicCache(config=config)
    return t.EncoderDecoderCache(cache, DynamicCache(config=config)) if model.config.is_encoder_decoder else cache


def tiered(model: Any, **options: Any) -> TieredCache:
    """Return a cache of ours with a small tier of its own."""
    return TieredCache(model, **{"memory": "8MiB", **options})


def given(cache: TieredCache) -> Any:
    """Return a cache as `generate` takes it."""
    return cache.with_cross_attention() if cache.geometry.has_encoder else cache


def generate(model: Any, ids: torch.Tensor, cache: Any, new: int = 12, seed: int = 2, **options: Any) -> Any:
    """Generate so many tokens; the result has sequences and logits."""
    torch.manual_seed(seed)
    return model.generate(
        ids, past_key_values=cache, max_new_tokens=new, min_new_tokens=new, output_logits=True,
        return_dict_in_generate=True, **{"do_sample": False, **options},
    )  # fmt: skip


def assert_same(ours: Any, theirs: Any) -> None:
    """Compare tokens, and logits bit for bit."""
    assert ours.sequences.tolist() == theirs.sequences.tolist()
    assert all(torch.equal(mine, other) for mine, other in zip(ours.logits, theirs.logits, strict=True))
