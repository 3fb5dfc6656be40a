"""The parts of a checkpoint, told by the names and shapes of its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagein.weights.planning.anatomy import Anatomy, dissect
from pagein.weights.reading.checkpoint import open_checkpoint
from tests.weights.headers import LLAMA, llama, mixture, write_folder


def parts_of(folder: Path, shapes: dict[str, tuple[int, ...]], **changes: object) -> Anatomy:
    """Write a folder and return its parts."""
    return dissect(open_checkpoint(write_folder(folder, shapes, {**LLAMA, **changes})))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_decoder(tmp_path, shards):
    """Blocks are the family of numbered names, embedding and head the matrices of the vocabulary, the rest is small."""
    parts = dissect(open_checkpoint(write_folder(tmp_path / "m", llama(), LLAMA, shards=shards)))
    assert [block.name for block in parts.blocks] == [f"model.layers.{index}" for index in range(4)]
    assert {len(block.dense) for block in parts.blocks} == {8}
    assert [table.name for table in parts.embeddings] == ["model.embed_tokens.weight"]
    assert parts.head is not None
    assert parts.head.name == "lm_head.weight"
    assert [tensor.name for tensor in parts.small] == ["model.norm.weight"]
    assert not parts.tied


def test_blocks_are_in_the_order_of_their_numbers(tmp_path):
    """Block 10 comes after block 9, whatever the order of names."""
    shapes = dict(sorted(llama(layers=12).items()))
    names = [block.name for block in parts_of(tmp_path / "m", shapes).blocks]
    assert names == [f"model.layers.{index}" for index in range(12)]


@pytest.mark.parametrize("stored", [False, True])
def test_a_tied_head_is_the_embedding(tmp_path, stored):
    """A tied head counts once, also where the checkpoint holds it a second time."""
    parts = parts_of(tmp_path / "m", llama(tied=not stored), tie_word_embeddings=True)
    assert parts.tied
    assert parts.head is parts.embeddings[0]
    assert [tensor.name for tensor in parts.small] == ["model.norm.weight"]


def test_a_model_without_a_head(tmp_path):
    """A class that makes vectors has no head, although the config says nothing about tying."""
    parts = parts_of(tmp_path / "m", llama(tied=True), architectures=["LlamaModel"], tie_word_embeddings=None)
    assert parts.head is None
    assert not parts.tied


def test_an_encoder_decoder_has_two_stacks(tmp_path):
    """Both families of an encoder-decoder are blocks; its tables of one shape are one tensor."""
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (1000, 64), "encoder.embed_tokens.weight": (1000, 64)}
    for side in ("encoder", "decoder"):
        for index in range(3):
            shapes[f"{side}.block.{index}.layer.0.SelfAttention.k.weight"] = (64, 64)
            shapes[f"{side}.block.{index}.layer.1.wi.weight"] = (256, 64)
        shapes[f"{side}.final_layer_norm.weight"] = (64,)
    parts = parts_of(tmp_path / "m", shapes, architectures=["T5ForConditionalGeneration"], tie_word_embeddings=True)
    assert [len(stack) for stack in parts.stacks] == [3, 3]
    assert parts.stacks[1][0].name == "decoder.block.0"
    assert len(parts.embeddings) == 1
    assert parts.tied
    assert len(parts.small) == 2


@pytest.mark.parametrize("fused", [False, True])
def test_routed_experts_are_told_from_shared_ones(tmp_path, fused):
    """Experts of a list or of one tensor are routed; router, shared experts and the dense first block are not."""
    parts = parts_of(tmp_path / "m", mixture(fused), num_experts=8, num_experts_per_tok=2)
    assert len(parts.blocks) == 4
    assert (parts.experts, parts.active_experts) == (8, 2)
    assert parts.blocks[0].experts == ()
    assert len(parts.blocks[1].experts) == (2 if fused else 24)
    assert {tensor.name.split(".mlp.")[-1] for tensor in parts.blocks[1].dense if "mlp" in tensor.name} == {
        "gate.weight",
        "shared_experts.up_proj.weight",
    }


def test_experts_without_a_count_are_dense(tmp_path):
    """Where the config does not say how many experts are active, every one is read."""
    parts = parts_of(tmp_path / "m", mixture(fused=False), num_experts=8)
    assert parts.experts == 0
    assert not any(block.experts for block in parts.blocks)


def test_a_small_family_is_no_stack(tmp_path):
    """A numbered list with next to none of the weights, or of unlike members, stays in memory."""
    shapes = {**llama(scale=2), "proj.0.weight": (8, 8), "proj.1.weight": (8, 8), "head.0.weight": (64, 900)}
    shapes["head.2.bias"] = (900,)
    parts = parts_of(tmp_path / "m", shapes, hidden_size=128)
    assert len(parts.stacks) == 1
    assert {tensor.name.partition(".")[0] for tensor in parts.small} == {"proj", "head", "model"}


def test_a_padded_table_is_one_of_words_and_one_of_positions_is_not(tmp_path):
    """Rows beyond the vocabulary are padding, unless another table has just as many rows as words."""
    padded = parts_of(tmp_path / "p", llama(words=1024))
    assert padded.embeddings[0].name == "model.embed_tokens.weight"
    assert padded.head is not None
    positions = {"model.wpe.weight": (2048, 64), **llama(tied=True)}
    parts = parts_of(tmp_path / "w", positions, tie_word_embeddings=True)
    assert [table.name for table in parts.embeddings] == ["model.embed_tokens.weight"]
    assert parts.head is parts.embeddings[0]
    assert "model.wpe.weight" in {tensor.name for tensor in parts.small}
