"""Small random models of several kinds: a streamed one must say what a full load says on the same device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from common.results import Row, row
from pagein import AutoModel
from pagein.weights.reading.checkpoint import open_checkpoint
from pagein.weights.reading.disk import probe

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 512,
}
CASES = (
    ("llama", "bfloat16"),
    ("llama", "float16"),
    ("llama", "float32"),
    ("llama, tied", "bfloat16"),
    ("qwen2", "bfloat16"),
    ("gemma3, tied", "bfloat16"),
    ("mixtral", "bfloat16"),
    ("qwen3-moe", "bfloat16"),
    ("gpt2, tied", "float32"),
)
PACKED = (("llama", "bfloat16"), ("qwen2", "bfloat16"))
"""Also in 4 bits."""
SHARES = (1.0, 0.75, 0.4)
"""Of the weights, in memory: all, some blocks away, the head in tiles too."""
NEW = 12
PROMPT = 19


@dataclass(frozen=True, slots=True)
class Compared:
    """A streamed model beside one that is wholly in memory."""

    name: str
    head: str
    same_logits: bool
    """Bit for bit."""
    same_tokens: bool
    farthest: float
    """The largest difference of two logits, as a share of the largest logit."""


def config_of(kind: str) -> Any:
    """The configuration of a kind."""
    tied = {"tie_word_embeddings": kind.endswith("tied")}
    experts = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
    t = transformers
    match kind.partition(",")[0]:
        case "llama":
            return t.LlamaConfig(**SIZES, **tied)
        case "qwen2":
            return t.Qwen2Config(**SIZES, **tied)
        case "gemma3":
            return t.Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=16, **tied)
        case "mixtral":
            return t.MixtralConfig(**SIZES, num_local_experts=8, **tied)
        case "qwen3-moe":
            return t.Qwen3MoeConfig(**SIZES, **experts, **tied)
    return t.GPT2Config(n_embd=512, n_layer=6, n_head=8, vocab_size=8192, n_positions=512)


def make(folder: Path, kind: str, dtype: str) -> Path:
    """Write a random model of several files; returns its folder."""
    path = folder / f"{kind.replace(', ', '-')}-{dtype}"
    if not (path / "config.json").is_file():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_of(kind)).to(getattr(torch, dtype))
        model.save_pretrained(path, max_shard_size="20MB")
    return path


def compare_all(folder: Path, device: str) -> list[Compared]:
    """Compare every case."""
    found: list[Compared] = []
    for kind, dtype in CASES:
        path = make(folder, kind, dtype)
        full = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto").to(device).eval()
        _one_by_one(full)
        found += [_compare(f"{kind}, {dtype}", full, _streamed(path, device, share)) for share in SHARES]
    for kind, dtype in PACKED:
        path, shards = make(folder, kind, dtype), folder / f"{kind}-4bit"
        settings = {"compression": "4bit", "shards_path": shards}
        full = _streamed(path, device, 1.0, **settings)
        found += [_compare(f"{kind}, 4bit", full, _streamed(path, device, share, **settings)) for share in SHARES[1:]]
        full.pagein.close()
    return found


def _streamed(path: Path, device: str, share: float, **settings: Any) -> Any:
    """Load with a share of the weights in memory."""
    speed = probe(open_checkpoint(path).files)
    size = {"context": 64, "batch": 2, "chunk": 64, "speed": speed, "device": device, "verbose": False}
    model = AutoModel.from_pretrained(path, memory=1 << 50, **size, **settings)
    needs = model.pagein.plan.needs
    model.pagein.set_memory(needs.fixed + int((needs.whole - needs.fixed) * share))
    _one_by_one(model)
    return model


def _one_by_one(model: Any) -> None:
    """Let experts compute one after another: a device's grouped kernel may add up in another order."""
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")


@torch.inference_mode()
def _compare(name: str, full: Any, model: Any) -> Compared:
    ids = torch.randint(0, 8192, (2, PROMPT), generator=torch.Generator().manual_seed(1)).to(model.device)
    settings = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected, logits = full(ids).logits, model(ids).logits
    same = torch.equal(model.generate(ids, **settings), full.generate(ids, **settings))
    farthest = ((logits - expected).abs().max() / expected.abs().max()).item()
    compared = Compared(name, model.pagein.plan.head.value, torch.equal(logits, expected), same, farthest)
    model.pagein.close()
    return compared


def rows_of(compared: Sequence[Compared]) -> Iterator[Row]:
    """Runs whose result is another."""
    whole = [one for one in compared if one.head != "tiled"]
    tiled = [one for one in compared if one.head == "tiled"]
    unlike = sum(not one.same_logits for one in whole)
    yield row(f"runs of {len(whole)} whose logits are not, bit for bit, those of a full load", "", unlike, at_most=0)
    unlike = sum(not one.same_tokens for one in compared)
    yield row(f"runs of {len(compared)} whose greedy tokens are not those of a full load", "", unlike, at_most=0)
    if tiled:
        unlike = sum(not one.same_logits for one in tiled)
        yield row(f"runs of {len(tiled)} with the head in tiles whose logits differ in a bit", "", unlike)
        far = max(one.farthest for one in tiled)
        yield row("head in tiles: farthest logit from a full load's", "of the largest", far, at_most=0.02)
