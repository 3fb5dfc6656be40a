"""Makes the model that `bench-weights` runs: real shapes, random weights, in every format that an arm wants.

A checkpoint of several safetensors shards (bfloat16), and the same weights as GGUF in 16 bits and in Q4_0. The weights
are a function of the tensors' names alone, so a second run makes the same bytes. No more is held than one shard of the
checkpoint, or one tensor of a GGUF file.

    python benchmarks/weights_models.py FOLDER [--only hf f16 q4] [--blocks N]
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.wire import BenchmarkError

if TYPE_CHECKING:
    from torch import Tensor

SHARD_BYTES = 500_000_000
SHAPE: dict[str, Any] = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": False,
    "eos_token_id": 151645,
    "bos_token_id": 151643,
    "dtype": "bfloat16",
}
"""Qwen2.5-1.5B with a head of its own: 1.78 billion weights, 3.55 GB in 16 bits."""
BLOCKS: int = SHAPE["num_hidden_layers"]
FORMATS = ("hf", "f16", "q4")
BYTES = {"hf": 2.0, "f16": 2.0, "q4": 0.5625}
"""Of one weight."""


@dataclass(frozen=True, slots=True)
class Models:
    """Where each format lies. With fewer blocks it is a smaller model for a quick run."""

    folder: Path
    blocks: int = BLOCKS

    @property
    def config(self) -> dict[str, Any]:
        """As `config.json` has it."""
        return SHAPE | {"num_hidden_layers": self.blocks}

    def path(self, kind: str) -> Path:
        """The path of a format by its name."""
        return self.folder / (f"random-{self.blocks}-blocks" + {"hf": "", "f16": ".f16.gguf", "q4": ".q4_0.gguf"}[kind])

    def files(self, kind: str) -> list[Path]:
        """The weight files of a format."""
        return sorted(self.path(kind).glob("*.safetensors")) if kind == "hf" else [self.path(kind)]


def make(models: Models, kinds: tuple[str, ...] = FORMATS) -> None:
    """Make what is missing, each whole or not at all; raises BenchmarkError when the disk is too full."""
    missing = [kind for kind in kinds if not models.path(kind).exists()]
    models.folder.mkdir(parents=True, exist_ok=True)
    weights = sum(map(prod, shapes(models).values()))
    need = sum(weights * BYTES[kind] * 1.01 for kind in missing)
    free = shutil.disk_usage(models.folder).free
    if need > free:
        raise BenchmarkError(
            f"{models.folder} has {free / 1e9:.1f} GB free, and {', '.join(missing)} take {need / 1e9:.1f} GB"
        )
    for kind in missing:
        print(f"making {models.path(kind).name}", file=sys.stderr, flush=True)
        part = models.path(kind).with_name(models.path(kind).name + ".part")
        _remove(part)
        try:
            if kind == "hf":
                _write_checkpoint(part, models)
            else:
                write_gguf(part, models, kind)
            part.rename(models.path(kind))
        finally:
            _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    with suppress(FileNotFoundError):
        path.unlink()


def shapes(models: Models) -> dict[str, tuple[int, ...]]:
    """The checkpoint's tensors, as transformers names and orders them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**models.config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """The random weights of a tensor, bfloat16, as they are at the start of a training."""
    import torch

    seeded = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.empty(shape, dtype=torch.bfloat16)
    values.normal_(0.0, 0.02, generator=seeded)
    return values + 1 if name.endswith("norm.weight") else values


def _write_checkpoint(folder: Path, models: Models) -> None:
    from safetensors.torch import save_file

    folder.mkdir()
    groups = list(_shards(shapes(models)))
    places: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05}-of-{len(groups):05}.safetensors"
        save_file({name: tensor(name, shape) for name, shape in group.items()}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(group, file)
    total = sum(_size(shape) for group in groups for shape in group.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    (folder / "config.json").write_text(json.dumps(models.config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": SHAPE["eos_token_id"]}))
    _write_tokenizer(folder)


def _shards(tensors: dict[str, tuple[int, ...]]) -> Iterator[dict[str, tuple[int, ...]]]:
    """Tensors in their order, cut where a shard is full: blocks lie across two files, as in real checkpoints."""
    group: dict[str, tuple[int, ...]] = {}
    filled = 0
    for name, shape in tensors.items():
        if group and filled + _size(shape) > SHARD_BYTES:
            yield group
            group, filled = {}, 0
        group[name] = shape
        filled += _size(shape)
    yield group


def _size(shape: tuple[int, ...]) -> int:
    """Bytes in 16 bits."""
    return 2 * prod(shape)


def vocabulary() -> list[str]:
    """Single bytes, then unused tokens: prompts are given as numbers, but every loader wants a tokenizer."""
    from tokenizers.pre_tokenizers import ByteLevel

    single = sorted(ByteLevel.alphabet())
    return single + [f"[unused {number}]" for number in range(len(single), SHAPE["vocab_size"])]


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = vocabulary()
    made = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": words[SHAPE["eos_token_id"]]}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=1))


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_BLOCK = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """What llama.cpp calls a tensor of the checkpoint."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    block, _, rest = name.removeprefix("model.layers.").partition(".")
    part, _, kind = rest.rpartition(".")
    return f"blk.{block}.{_GGUF_BLOCK[part]}.{kind}"


def write_gguf(path: Path, models: Models, kind: str) -> None:
    """Write the same weights for llama.cpp: matrices in 16 bits or Q4_0, vectors in 32 bits."""
    import numpy as np
    from gguf import GGMLQuantizationType as Kind
    from gguf import GGUFWriter
    from gguf.quants import quant_shape_to_byte_shape, quantize

    matrix = Kind.F16 if kind == "f16" else Kind.Q4_0
    writer = GGUFWriter(path, "qwen2")
    _write_facts(writer, models, kind)
    kinds = {name: matrix if len(shape) > 1 else Kind.F32 for name, shape in shapes(models).items()}
    for name, shape in shapes(models).items():
        stored = quant_shape_to_byte_shape(shape, kinds[name]) if kinds[name] is Kind.Q4_0 else shape
        dtype = {Kind.F16: np.float16, Kind.F32: np.float32, Kind.Q4_0: np.uint8}[kinds[name]]
        size = int(np.prod(stored)) * np.dtype(dtype).itemsize
        writer.add_tensor_info(gguf_name(name), stored, np.dtype(dtype), size, raw_dtype=kinds[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, shape in shapes(models).items():
        writer.write_tensor_data(quantize(tensor(name, shape).float().numpy(), kinds[name]))
    writer.close()


def _write_facts(writer: Any, models: Models, kind: str) -> None:
    from gguf import LlamaFileType, TokenType

    writer.add_name(models.path("hf").name)
    writer.add_block_count(models.blocks)
    writer.add_context_length(SHAPE["max_position_embeddings"])
    writer.add_embedding_length(SHAPE["hidden_size"])
    writer.add_feed_forward_length(SHAPE["intermediate_size"])
    writer.add_head_count(SHAPE["num_attention_heads"])
    writer.add_head_count_kv(SHAPE["num_key_value_heads"])
    writer.add_rope_freq_base(SHAPE["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(SHAPE["rms_norm_eps"])
    writer.add_file_type(LlamaFileType.MOSTLY_F16 if kind == "f16" else LlamaFileType.MOSTLY_Q4_0)
    words = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(words)
    writer.add_token_types([TokenType.NORMAL] * len(words))
    writer.add_token_merges([f"{words[0]} {words[1]}"])  # llama.cpp refuses an empty list
    writer.add_eos_token_id(SHAPE["eos_token_id"])
    writer.add_bos_token_id(SHAPE["bos_token_id"])
    writer.add_add_bos_token(False)


def main() -> int:
    """Make the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--blocks", type=int, default=BLOCKS, help="fewer make a smaller model (default %(default)s)")
    told = parser.parse_args()
    models = Models(told.folder, told.blocks)
    make(models, tuple(told.only))
    for kind in told.only:
        size = sum(file.stat().st_size for file in models.files(kind))
        print(f"{models.path(kind)}: {size / 1e9:.2f} GB in {len(models.files(kind))} files")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BenchmarkError as error:
        print(f"weights_models: {error}", file=sys.stderr)
        sys.exit(1)
