"""What a checkpoint takes, from headers and config alone: stored as it is, or with its blocks in 8 or 4 bits.

Good enough to advise by (`pagein plan MODEL --memory …`); a run is planned from the built model and measured sizes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pagein.catalog.estimate_transformers import BIASES
from pagein.catalog.geometry import F16
from pagein.catalog.gpu_build import torch_for_gpus
from pagein.catalog.hf_config import read_config, traits_of
from pagein.catalog.safetensors import BITS, StoredTensor
from pagein.weights.packed.packed_sizes import can_pack, packed_bytes
from pagein.weights.planning.anatomy import Anatomy, Block, dissect, text_config, whole
from pagein.weights.planning.demand import Experts, Needs, Unit
from pagein.weights.reading.checkpoint import Checkpoint
from pagein.weights.reading.layout import PAGE, lay_out

RUNTIME = 400 * 1024**2
"""Bytes of a process with torch 2.13 for CPUs and transformers 5.24: 334 MiB once imported, and its threads.

One for GPUs takes `torch_for_gpus` more."""
CHUNK = 256
"""Tokens of a prompt that go through the model in one pass."""
FLOATS = ("BF16", "F16", "F32")
BITS_OF = {"8bit": 8, "4bit": 4}
HEAD_BITS = 8
"""A compressed model's head: its rounding goes straight into the logits, so it is not cut further."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The needs of a checkpoint in one precision, and the bytes on disk that it takes beside the original."""

    needs: Needs
    shard_bytes: int
    """Free disk needed to write it once, embedding and small tensors included; 0 for the checkpoint as it is."""


def read_needs(
    checkpoint: Checkpoint,
    *,
    context: int,
    batch: int = 1,
    compression: str | None = None,
    runtime: int | None = None,
    anatomy: Anatomy | None = None,
) -> Sizes:
    """Return what the checkpoint needs for sequences of so many tokens; ``compression`` is None, 8bit or 4bit.

    ``runtime``: the process without a model; by default that of the installed torch.
    """
    parts = anatomy or dissect(checkpoint)
    bits = BITS_OF[compression] if compression is not None else None
    head = _size(parts.head, HEAD_BITS if bits else None) if parts.head is not None else 0
    units = tuple(_unit(block, bits) for block in parts.blocks)
    small, embedding = _stored(parts.small), _stored(parts.embeddings)
    experts = _experts(parts)
    per_token, window = cache_bytes(checkpoint, parts, context)
    needs = Needs(
        runtime=RUNTIME + torch_for_gpus() if runtime is None else runtime,
        resident_small=small,
        embedding=embedding,
        head=head,
        tied=parts.tied and bits is None,  # a head in 8 bits is a tensor of its own beside the table
        units=units,
        kv_per_token=per_token,
        context=context,
        batch=batch,
        activations=activations(checkpoint, parts, batch, context, at_once(checkpoint, context)),
        head_rows=parts.head.shape[0] if parts.head is not None else 0,
        kv_fixed=window,
        experts=experts,
    )
    written = sum(unit.slot_bytes for unit in units) + head + embedding + small + (experts.total if experts else 0)
    return Sizes(needs, written if bits else 0)


def can_be_packed(anatomy: Anatomy) -> bool:
    """Tell whether the blocks are floats, which can be written in fewer bits."""
    sizes = {True: 0, False: 0}
    for block in anatomy.blocks:
        for tensor in (*block.dense, *block.experts):
            sizes[tensor.dtype in FLOATS] += tensor.nbytes
    return sizes[True] > sizes[False]


def at_once(checkpoint: Checkpoint, context: int) -> int:
    """Return the tokens of one sequence that go through the model together: a piece, or the whole text (an encoder)."""
    traits = traits_of(checkpoint.config)
    return context if traits["whole_texts"] is True else min(CHUNK, context)


def activations(checkpoint: Checkpoint, anatomy: Anatomy, batch: int, context: int, chunk: int = CHUNK) -> int:
    """Estimate the bytes beside weights and cache at the peak of a pass over a piece of the prompt of each sequence.

    batch × (min(context, chunk) × (4 × hidden + 3 × inner) × 4 + vocabulary × 8): residual, inputs and outputs of the
    attention; gate, up and their product, in fp32 at the worst; the last position's logits and what sampling makes of
    them. With latent attention also the keys and values that one block expands for the whole context. A position bias
    costs two numbers per head and pair of tokens, itself and its sum with the mask (T5: measured, see the catalog).
    """
    shape = read_config(checkpoint.folder)
    hidden = shape.embedding_length or max((table.shape[1] for table in anatomy.embeddings), default=0)
    inner = max(shape.feed_forward_length or 0, 4 * hidden)
    words = anatomy.head.shape[0] if anatomy.head is not None else 0
    expanded = context * _latent(checkpoint).get("expanded", 0) * _item(anatomy)
    tokens = min(context, chunk)
    biased = traits_of(checkpoint.config)["position_bias"] is True
    biases = BIASES * (shape.heads or 0) * tokens**2 * 4 if biased else 0
    return batch * (tokens * (4 * hidden + 3 * inner) * 4 + words * 8 + expanded + biases)


def _unit(block: Block, bits: int | None) -> Unit:
    if bits is None:
        layout = lay_out(block.dense)
        return Unit(block.name, layout.read_bytes, layout.nbytes)
    size = -(-sum(_size(tensor, bits) for tensor in block.dense) // PAGE) * PAGE
    return Unit(block.name, size, size)


def _size(tensor: StoredTensor, bits: int | None) -> int:
    """Bytes of a tensor: matrices of floats in so many bits, everything else as stored."""
    if bits is None or len(tensor.shape) < 2 or tensor.dtype not in FLOATS:
        return tensor.nbytes
    *outer, rows, width = tensor.shape
    return prod(outer) * packed_bytes(rows, width, bits) if can_pack(rows, width, bits) else tensor.nbytes


def _stored(tensors: Iterable[StoredTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _experts(parts: Anatomy) -> Experts | None:
    """Routed experts as they are stored: also beside packed blocks they are read one by one from there."""
    if not parts.experts:
        return None
    sizes = [_stored(block.experts) for block in parts.blocks]
    active = [size * parts.active_experts // parts.experts for size in sizes]
    return Experts(sum(sizes), sum(active), max(active, default=0)) if sum(sizes) else None


def _item(anatomy: Anatomy) -> int:
    """Bytes of a computed value: those of the dtype that most of the blocks are stored in, at least two."""
    sizes: dict[str, int] = {}
    for block in anatomy.blocks:
        for tensor in block.dense:
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(BITS[max(sizes, key=sizes.__getitem__)] // 8, F16) if sizes else F16


def cache_bytes(checkpoint: Checkpoint, parts: Anatomy, context: int) -> tuple[int, int]:
    """Bytes of the KV cache that grow with each token, and those of one sequence that do not.

    As transformers 5.24 keeps it: latents as they are, a window where layers have one. The geometry where it tells,
    else the rows of the key and value projections, else all heads (never too little).
    """
    item, shape, latent = _item(parts), read_config(checkpoint.folder), _latent(checkpoint)
    if latent and shape.layers:
        return shape.layers * latent["stored"] * item, 0
    if shape.kv_bytes_per_token is not None and checkpoint.config.get("is_encoder_decoder") is not True:
        window = shape.kv_window_bytes * min(context, shape.kv_window) // shape.kv_window if shape.kv_window else 0
        return shape.kv_bytes_per_token * item // F16, window * item // F16
    blocks = [block for block in parts.blocks if "encoder" not in block.name.split(".")]
    rows = sum(tensor.shape[0] for block in blocks for tensor in block.dense if _is_key_or_value(tensor))
    width = max((table.shape[1] for table in parts.embeddings), default=0)
    return (rows or 2 * width * len(blocks)) * item, 0


def _latent(checkpoint: Checkpoint) -> dict[str, int]:
    """Values per layer and token of latent attention: ``stored`` in the cache, ``expanded`` to compute with."""
    text = text_config(checkpoint.config)
    names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "num_attention_heads")
    rank, rope, nope, value, heads = (whole(text.get(name)) for name in names)
    if not rank or not heads:
        return {}
    return {"stored": rank + rope, "expanded": heads * (nope + rope + value)}


def _is_key_or_value(tensor: StoredTensor) -> bool:
    words = tensor.name.split(".")
    return len(tensor.shape) == 2 and len(words) > 1 and words[-2] in ("k_proj", "v_proj", "k", "v")
