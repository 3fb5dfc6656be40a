"""Small models of real architectures with random weights, made once per run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagein.weights.reading.disk import DiskSpeed
from pagein.weights.reading.files import ReadMode

VOCABULARY = 512
SPEED = DiskSpeed(ReadMode.DIRECT, 1e9, None, None, 2, 1 << 20, "given by the test")
"""Tests compare numbers, not speeds: nothing is probed."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}

Make = Callable[..., Path]


def _configs() -> dict[str, Any]:
    import transformers as t

    return {
        "llama": t.LlamaConfig(**SMALL),
        "llama-tied": t.LlamaConfig(**SMALL, tie_word_embeddings=True),
        "qwen2": t.Qwen2Config(**SMALL),
        "qwen3": t.Qwen3Config(**SMALL, head_dim=16),
        "gemma3": t.Gemma3TextConfig(**SMALL, head_dim=16, sliding_window=16),
        "mixtral": t.MixtralConfig(**SMALL, num_local_experts=4),
        "qwen3-moe": t.Qwen3MoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32),
        "gpt2": t.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1),
        "t5": t.T5Config(
            d_model=64, d_kv=16, d_ff=128, num_layers=3, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
        ),
    }


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that writes the model of a kind in a dtype, in shards of a size, and returns its folder."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(2)
    made: dict[tuple[str, str, str], Path] = {}

    def make(kind: str, dtype: str = "bfloat16", shards: str = "60KB") -> Path:
        key = (kind, dtype, shards)
        if key not in made:
            config = _configs()[kind]
            auto = (
                transformers.AutoModelForSeq2SeqLM if config.is_encoder_decoder else transformers.AutoModelForCausalLM
            )
            torch.manual_seed(0)
            folder = tmp_path_factory.mktemp("model")
            auto.from_config(config).to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shards)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture
def load() -> Any:
    """Return a function that loads a folder with a share of its weights in memory, and closes it after the test."""
    opened: list[Any] = []

    def open_model(folder: Path, share: float = 1.0, **options: Any) -> Any:
        from pagein import AutoModel

        settings = {"context": 64, "batch": 4, "chunk": 64, "speed": SPEED, "verbose": False, **options}
        # The process's own bytes depend on what ran before: the budget is counted from them.
        model = AutoModel.from_pretrained(folder, memory=1 << 40, **settings)
        opened.append(model.pagein)
        needs = model.pagein.plan.needs
        model.pagein.set_memory(needs.fixed + int((needs.whole - needs.fixed) * share))
        return model

    yield open_model
    for streamed in opened:
        streamed.close()
