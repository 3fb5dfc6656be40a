"""Small models, their stock caches, and pools over them, for the tests of tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as t
from transformers import DynamicCache

from pagein.kv.disk.store import BlockStore
from pagein.kv.tiers.pool import KvPool
from pagein.kv.tiers.settings import KvSettings

ARGUMENT = "cache" if tuple(map(int, t.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
"""What transformers calls the cache."""
VOCABULARY = 256
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
}
NO_WORTH = {"worth": False}
"""Tests compare numbers, not speeds: nothing is skipped because it was slow once."""


def make(kind: str = "llama", seed: int = 0) -> Any:
    """Return a model of a kind with random weights, that never stops by itself."""
    t.logging.set_verbosity_error()
    torch.set_num_threads(1)  # for models this small a second thread only waits
    configs = {
        "llama": lambda: t.LlamaConfig(**SMALL),
        "gemma3": lambda: t.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=100, layer_types=_LAYERS),
        "lfm2": lambda: t.Lfm2Config(
            **SMALL, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
        ),
        "qwen3-next": lambda: t.Qwen3NextConfig(**{**SMALL, "num_hidden_layers": 4}, **_NEXT),
    }
    torch.manual_seed(seed)
    model = t.AutoModelForCausalLM.from_config(configs[kind]()).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


_NEXT = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"] * 2,
}
_LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]


def pool_of(model: Any, blocks: float, disk: Path | BlockStore | None = None, **options: Any) -> KvPool:
    """Return a pool whose device has room for so many blocks of tokens in all groups."""
    from pagein.kv.cache.reading import read_geometry

    geometry = read_geometry(model)
    block = sum(group.block_bytes for group in geometry.groups)
    settings = {**NO_WORTH, **options.pop("settings", {})}
    return KvPool(model, memory=int(blocks * block), disk=disk, settings=KvSettings(**settings), **options)


def write(model: Any, cache: Any, ids: list[int], new: int = 6, **options: Any) -> list[int]:
    """Generate greedily with a cache; return all tokens."""
    whole = torch.tensor([ids])
    mask = torch.ones_like(whole)  # else a token that happens to be the padding's is taken for padding
    with torch.inference_mode():
        out = model.generate(
            whole, attention_mask=mask, **{ARGUMENT: cache}, max_new_tokens=new, do_sample=False, **options
        )
    return [int(one) for one in out[0]]


def turn(pool: KvPool, model: Any, name: str | None, ids: list[int], new: int = 6, tenant: str = "") -> tuple[Any, Any]:
    """Run one turn of a conversation; return its tokens and what it reused."""
    cache = pool.open(name, tenant)
    with cache.turn(ids) as one:
        out = write(model, cache, ids, new)
        one.end(out)
    return out, one.reuse


class Plain:
    """Conversations over unlimited stock caches: what every answer must equal."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._caches: dict[object, Any] = {}

    def turn(self, name: object, ids: list[int], new: int = 6) -> list[int]:
        """Run one turn that continues all that was said."""
        cache = self._caches.setdefault(name, DynamicCache(config=self._model.config))
        return write(self._model, cache, ids, new)


def words(count: int, seed: int = 0) -> list[int]:
    """Return random tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [int(one) for one in torch.randint(1, VOCABULARY, (count,), generator=generator)]


def check_whole(pool: KvPool) -> None:
    """Nothing is leaked: every block has as many holders as rows and copies know."""
    pool.flush()
    report = pool.report()
    assert report.leaks == ()
    assert report.device.used <= report.device.budget
    assert report.device.peak <= report.device.budget
