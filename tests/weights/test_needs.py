"""What a checkpoint takes, from headers alone: every figure against one that was added up by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.catalog.gpu_build import torch_for_gpus
from pagein.weights.planning.anatomy import dissect
from pagein.weights.planning.needs import RUNTIME, can_be_packed, read_needs
from pagein.weights.reading.checkpoint import Checkpoint, open_checkpoint
from tests.weights.headers import LLAMA, llama, mixture, size_of, write_folder

PAGE = 4096


def checkpoint_of(
    folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "BF16", **changes: object
) -> Checkpoint:
    """Write a folder and open it."""
    return open_checkpoint(write_folder(folder, shapes, {**LLAMA, **changes}, dtype=dtype))


def block_bytes(shapes: dict[str, tuple[int, ...]], index: int, dtype: str = "BF16") -> int:
    """Return the stored bytes of one block."""
    return sum(size_of(shape, dtype) for name, shape in shapes.items() if f".layers.{index}." in name)


def test_a_decoder_as_stored(tmp_path):
    """Blocks count in whole pages, embedding and head apart, everything else as small; nothing is written."""
    sizes = read_needs(checkpoint_of(tmp_path / "m", llama()), context=100, batch=3)
    needs = sizes.needs
    assert len(needs.units) == 4
    for unit in needs.units:
        assert block_bytes(llama(), 0) <= unit.nbytes == unit.slot_bytes <= block_bytes(llama(), 0) + 2 * PAGE
    assert needs.embedding == needs.head == 1000 * 64 * 2
    assert needs.head_rows == 1000
    assert needs.resident_small == 64 * 2
    assert (needs.runtime, needs.tied, sizes.shard_bytes) == (RUNTIME + torch_for_gpus(), False, 0)


def test_kv_of_grouped_heads(tmp_path):
    """Keys and values of the cached heads, per layer and token, in the dtype of the weights, for all sequences."""
    needs = read_needs(checkpoint_of(tmp_path / "m", llama()), context=100, batch=3).needs
    assert needs.kv_per_token == 4 * 2 * 16 * 2 * 2
    assert needs.kv == 3 * 100 * needs.kv_per_token
    wide = read_needs(checkpoint_of(tmp_path / "w", llama(), dtype="F32"), context=100).needs
    assert wide.kv_per_token == 2 * needs.kv_per_token


@pytest.mark.parametrize(("context", "kept"), [(1000, 256), (100, 100)])
def test_kv_of_sliding_windows(tmp_path, context, kept):
    """Layers with a window keep no more than it; the others grow with the context."""
    kinds = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
    made = checkpoint_of(tmp_path / "m", llama(), sliding_window=256, layer_types=kinds)
    needs = read_needs(made, context=context).needs
    assert needs.kv_per_token == 2 * 16 * 2 * 2
    assert needs.kv_fixed == 3 * kept * 2 * 16 * 2 * 2


def test_kv_of_latent_attention(tmp_path):
    """Latents and rotary keys are cached, once for all heads; one block expands them for the whole context."""
    latent = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    needs = read_needs(checkpoint_of(tmp_path / "m", llama(), **latent), context=100).needs
    assert needs.kv_per_token == 4 * (32 + 8) * 2
    usual = read_needs(checkpoint_of(tmp_path / "u", llama()), context=100).needs
    assert needs.activations - usual.activations == 100 * 4 * (16 + 8 + 16) * 2


def test_kv_without_a_geometry_is_told_by_the_projections(tmp_path):
    """Where the config has no heads, the rows of the key and value matrices tell the cache."""
    made = checkpoint_of(tmp_path / "m", llama(), num_attention_heads=None)
    assert read_needs(made, context=100).needs.kv_per_token == 4 * (32 + 32) * 2


def test_kv_of_an_encoder_decoder(tmp_path):
    """Only the decoder caches: its own keys and values, and those of what it attends to."""
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (1000, 64)}
    for side, kinds in {"encoder": ["SelfAttention"], "decoder": ["SelfAttention", "EncDecAttention"]}.items():
        for index in range(3):
            for kind in kinds:
                shapes |= {f"{side}.block.{index}.{kind}.{name}.weight": (32, 64) for name in ("q", "k", "v")}
    made = checkpoint_of(tmp_path / "m", shapes, is_encoder_decoder=True, architectures=["T5ForConditionalGeneration"])
    assert read_needs(made, context=100).needs.kv_per_token == 3 * 4 * 32 * 2


def test_a_tied_head_counts_once(tmp_path):
    """A tied model's whole is smaller by one table."""
    tied = read_needs(checkpoint_of(tmp_path / "t", llama(tied=True), tie_word_embeddings=True), context=100).needs
    free = read_needs(checkpoint_of(tmp_path / "f", llama()), context=100).needs
    assert tied.tied
    assert free.whole - tied.whole == free.embedding


WIDE = {"hidden_size": 256, "intermediate_size": 1024}


def test_eight_bits(tmp_path):
    """Matrices of blocks take a byte a weight and a scale a row; norms and the embedding stay; all of it is written."""
    sizes = read_needs(checkpoint_of(tmp_path / "m", llama(scale=4), **WIDE), context=100, compression="8bit")
    matrices = [shape for name, shape in llama(scale=4).items() if ".layers.0." in name and len(shape) == 2]
    exact = sum(rows * columns + 2 * rows for rows, columns in matrices) + 256 * 2
    needs = sizes.needs
    assert exact <= needs.units[0].nbytes < exact + PAGE
    assert needs.embedding == 1000 * 256 * 2
    assert needs.head == 1000 * (256 + 2)
    assert sizes.shard_bytes == sum(unit.slot_bytes for unit in needs.units) + needs.head + needs.embedding + 512


def test_four_bits(tmp_path):
    """Half a byte a weight and two 16-bit numbers a group of 64; the head keeps 8 bits."""
    needs = read_needs(checkpoint_of(tmp_path / "m", llama(scale=4), **WIDE), context=100, compression="4bit").needs
    matrices = [shape for name, shape in llama(scale=4).items() if ".layers.0." in name and len(shape) == 2]
    exact = sum(rows * columns // 2 + rows * columns // 64 * 4 for rows, columns in matrices) + 256 * 2
    assert exact <= needs.units[0].nbytes < exact + PAGE
    assert needs.head == 1000 * (256 + 2)


def test_small_matrices_stay_as_they_are(tmp_path):
    """What is too narrow to be packed counts as stored."""
    made = checkpoint_of(tmp_path / "m", llama())
    stored, packed = (read_needs(made, context=100, compression=kind).needs for kind in (None, "4bit"))
    assert sum(unit.nbytes for unit in packed.units) >= 4 * block_bytes(llama(), 0)
    assert packed.head == stored.head


def test_a_compressed_tied_head_is_a_tensor_of_its_own(tmp_path):
    """A head in 8 bits is no longer the table that rows are gathered from."""
    made = checkpoint_of(tmp_path / "m", llama(tied=True, scale=4), tie_word_embeddings=True, **WIDE)
    needs = read_needs(made, context=100, compression="8bit").needs
    assert not needs.tied
    assert (needs.embedding, needs.head) == (1000 * 256 * 2, 1000 * (256 + 2))


@pytest.mark.parametrize("fused", [False, True])
def test_experts_are_counted_apart(tmp_path, fused):
    """Routed experts are in no unit; a token reads the active ones of every block, a block needs those of its own."""
    shapes = mixture(fused)
    made = checkpoint_of(tmp_path / "m", shapes, num_experts=8, num_experts_per_tok=2)
    needs = read_needs(made, context=100).needs
    routed = sum(size_of(shape) for name, shape in shapes.items() if ".experts." in name)
    assert needs.experts is not None
    assert needs.experts.total == routed
    assert needs.experts.per_token == routed * 2 // 8
    assert needs.experts.least == routed * 2 // 8 // 3
    assert read_needs(made, context=16, compression="4bit").needs.experts == needs.experts
    dense = block_bytes(shapes, 1) - routed // 3
    assert dense <= needs.units[1].slot_bytes


def test_activations_grow_with_batch_and_widths(tmp_path):
    """The estimate is its formula: widths per position of a prompt's piece, fp32 logits per sequence."""
    made = checkpoint_of(tmp_path / "m", llama())
    one, three = (read_needs(made, context=100, batch=batch).needs.activations for batch in (1, 3))
    assert one == 100 * (4 * 64 + 3 * 256) * 4 + 1000 * 8
    assert three == 3 * one
    assert read_needs(made, context=4096).needs.activations == 256 * (4 * 64 + 3 * 256) * 4 + 1000 * 8


@pytest.mark.parametrize(("dtype", "packable"), [("BF16", True), ("F32", True), ("F8_E4M3", False), ("U8", False)])
def test_only_floats_are_packed(tmp_path, dtype, packable):
    """What is stored as other numbers is not offered in fewer bits."""
    made = checkpoint_of(tmp_path / "m", llama(), dtype=dtype)
    assert can_be_packed(dissect(made)) is packable
