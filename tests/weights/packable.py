"""Small models that are just large enough to be packed, and a plain way to load a folder of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

SIDES = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}


def write_model(folder: Path, kind: str = "llama", **options: Any) -> Path:
    """Write a model with random weights: llama, llama-tied, gpt2 (Conv1D), t5 (looks at weights) or mixtral."""
    import torch
    import transformers as t

    configs = {
        "llama": t.LlamaConfig(**SIDES, attention_bias=True),
        "llama-tied": t.LlamaConfig(**SIDES, tie_word_embeddings=True),
        "gpt2": t.GPT2Config(n_embd=128, n_layer=2, n_head=4, vocab_size=320, n_positions=64),
        "t5": t.T5Config(d_model=128, d_kv=32, d_ff=192, num_layers=2, num_heads=4, vocab_size=320),
        "mixtral": t.MixtralConfig(**SIDES, num_local_experts=2),
    }
    auto = t.AutoModelForSeq2SeqLM if kind == "t5" else t.AutoModelForCausalLM
    torch.manual_seed(1)
    model = auto.from_config(configs[kind]).to(torch.bfloat16)
    with torch.no_grad():  # ones and zeros as norms and biases would hide a tensor that went elsewhere
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def load_whole(folder: Path, dtype: str = "auto") -> Any:
    """Load a model folder, or a folder of shards, with every tensor resident and no streaming."""
    import torch

    from pagein.weights.packed.making import swap_packed
    from pagein.weights.packed.shards import open_shards, read_manifest
    from pagein.weights.reading.original import Safetensors, read_source
    from pagein.weights.reading.sources import find_sources
    from pagein.weights.streaming.structure import build

    original = Safetensors(folder)
    model = build(original.checkpoint, dtype).model
    if (folder / "manifest.json").is_file():
        assert set(open_shards(folder)) >= {f"{path}.weight_packed" for path in read_manifest(folder).packed}
        swap_packed(model, read_manifest(folder))
    for name, source in find_sources(model, original.checkpoint).items():
        parent, _, leaf = name.rpartition(".")
        module = model.get_submodule(parent)
        value = read_source(original, source, 0, source.nbytes)
        tensors = module._buffers if leaf in module._buffers else module._parameters
        value = value.to(tensors[leaf].dtype).view(tensors[leaf].shape)
        tensors[leaf] = value if leaf in module._buffers else torch.nn.Parameter(value, requires_grad=False)
    original.close()
    return model


def as_pickle(source: Path, folder: Path) -> Path:
    """Write the same model as ``pytorch_model.bin``."""
    import torch
    from safetensors.torch import load_file

    folder.mkdir()
    shutil.copy(source / "config.json", folder)
    torch.save(load_file(source / "model.safetensors"), folder / "pytorch_model.bin")
    return folder
