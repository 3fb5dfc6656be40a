"""Model folders made of headers alone: the weights are holes in the files, so that no size costs disk."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

from pagein.catalog.safetensors import BITS

Shapes = Mapping[str, tuple[int, ...]]


def write_folder(folder: Path, shapes: Shapes, config: dict[str, object], dtype: str = "BF16", shards: int = 1) -> Path:
    """Write config and safetensors with the tensors of these shapes, spread over so many files; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(shapes)
    each = -(-len(names) // shards)
    for index in range(shards):
        part = {name: shapes[name] for name in names[index * each : (index + 1) * each]}
        file = "model.safetensors" if shards == 1 else f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        _write_file(folder / file, part, dtype)
    return folder


def _write_file(path: Path, shapes: Shapes, dtype: str) -> None:
    header: dict[str, object] = {}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + size_of(shape, dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def size_of(shape: tuple[int, ...], dtype: str = "BF16") -> int:
    """Return the bytes of a tensor."""
    values = 1
    for length in shape:
        values *= length
    return values * BITS[dtype] // 8


LLAMA: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
}
"""A small decoder: 4 layers, 2 of 4 heads cached, a head of its own."""


def llama(tied: bool = False, layers: int = 4, words: int = 1000, scale: int = 1) -> dict[str, tuple[int, ...]]:
    """Return the shapes of such a decoder, its widths times ``scale``."""
    width, inner = 64 * scale, 256 * scale
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (words, width)}
    for index in range(layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in _attention(width).items()}
        for name, shape in {
            "gate_proj": (inner, width),
            "up_proj": (inner, width),
            "down_proj": (width, inner),
        }.items():
            shapes[f"model.layers.{index}.mlp.{name}.weight"] = shape
    shapes["model.norm.weight"] = (width,)
    return shapes if tied else {**shapes, "lm_head.weight": (words, width)}


def mixture(fused: bool, experts: int = 8) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder whose first block is dense and whose other three have routed experts."""
    shapes = {name: shape for name, shape in llama().items() if "mlp" not in name or ".layers.0." in name}
    for index in range(1, 4):
        block = f"model.layers.{index}.mlp"
        shapes[f"{block}.gate.weight"] = (experts, 64)
        shapes[f"{block}.shared_experts.up_proj.weight"] = (32, 64)
        if fused:
            shapes |= {
                f"{block}.experts.gate_up_proj": (experts, 64, 64),
                f"{block}.experts.down_proj": (experts, 32, 64),
            }
            continue
        for expert in range(experts):
            for name, shape in {"gate_proj": (32, 64), "up_proj": (32, 64), "down_proj": (64, 32)}.items():
                shapes[f"{block}.experts.{expert}.{name}.weight"] = shape
    return shapes


def _attention(width: int) -> dict[str, tuple[int, ...]]:
    half = width // 2
    return {
        "input_layernorm.weight": (width,),
        "self_attn.q_proj.weight": (width, width),
        "self_attn.k_proj.weight": (half, width),
        "self_attn.v_proj.weight": (half, width),
        "self_attn.o_proj.weight": (width, width),
    }
