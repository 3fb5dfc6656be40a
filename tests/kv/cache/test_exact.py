"""A tiered cache in `generate` equals the stock cache bit for bit."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from pagein.kv.cache.layers import CROPS_TO_LENGTH
from tests.kv.cache.models import KINDS, assert_same, generate, given, model_of, prompt, stock, tiered

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*past_key_values.*:FutureWarning")]

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 20},
    "beams": {"num_beams": 4},
    "answers": {"do_sample": True, "num_return_sequences": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_in_every_way(kind: str, way: str) -> None:
    """Tokens and logits are those of the stock cache, over a block's edge and past every window."""
    model, ids = model_of(kind), prompt(118)
    theirs = generate(model, ids, stock(model), **WAYS[way])
    cache = tiered(model)
    assert_same(generate(model, ids, given(cache), **WAYS[way]), theirs)
    cache.close()
    assert cache.device_tier.used_bytes == 0


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 300])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3-short"])
def test_lengths_around_blocks_and_windows(kind: str, tokens: int) -> None:
    """A prompt may end before, at and behind a block's end, and be longer than the window and a block more."""
    model, ids = model_of(kind, "bfloat16"), prompt(tokens)
    assert_same(generate(model, ids, tiered(model), new=8), generate(model, ids, stock(model), new=8))


@pytest.mark.parametrize("way", ["greedy", "beams"])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "mixtral"])
def test_ragged_batches_padded_on_the_left(kind: str, way: str) -> None:
    """Rows hold their padding as the stock cache's do, and the mask that was given goes with them."""
    model, ids = model_of(kind), prompt(70, rows=3)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 13, 61)):
        ids[row, :padding], mask[row, :padding] = 0, 0
    theirs = generate(model, ids, stock(model), attention_mask=mask, **WAYS[way])
    assert_same(generate(model, ids, tiered(model), attention_mask=mask, **WAYS[way]), theirs)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("pieces", [[100, 1, 1], [30, 30, 30, 12], [5, 200, 3], [150, 150, 1], [1] * 5])
def test_a_prompt_in_pieces(kind: str, pieces: list[int]) -> None:
    """However the tokens come, each pass gives the bits of the stock cache's pass."""
    model, ids = model_of(kind), prompt(sum(pieces))
    caches = (tiered(model), stock(model))
    at = 0
    for size in pieces:
        piece = ids[:, at : at + size]
        with torch.no_grad():
            ours, theirs = (model(input_ids=piece, past_key_values=one, use_cache=True).logits for one in caches)
        assert torch.equal(ours, theirs)
        at += size
    for mine, other in zip(caches[0].layers, caches[1].layers, strict=True):
        assert torch.equal(mine.keys, other.keys)
        assert torch.equal(mine.values, other.values)
        assert mine.get_mask_sizes(3) == other.get_mask_sizes(3)
        assert mine.get_seq_length() == other.get_seq_length()


@pytest.mark.parametrize("kind", ["llama", "gemma3-short"])
def test_candidates_are_tried_and_one_is_kept(kind: str) -> None:
    """Repeat, compute, select and go on, as contrastive search does: the stock cache's bits all along."""
    model, ids = model_of(kind), prompt(60)
    logits = []
    for cache in (tiered(model), stock(model)):
        seen = [run(model, ids, cache)]
        for step in range(8):
            cache.batch_repeat_interleave(3)
            seen.append(run(model, prompt(1, rows=3, seed=step), cache))
            cache.batch_select_indices(torch.tensor([step % 3]))
        logits.append(seen)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*logits, strict=True))


@torch.no_grad()
def run(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    """Return the logits of one pass."""
    return model(input_ids=ids, past_key_values=cache, use_cache=True).logits


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3-short"])
def test_guesses_that_are_taken_back(kind: str) -> None:
    """Rejected guesses are cropped in both caches alike; a window records what it may have to give back."""
    if kind == "gemma3-short" and CROPS_TO_LENGTH:
        pytest.skip("this transformers does not take a window that is full back")
    model = model_of(kind)
    ids = prompt(8).repeat(1, 5)
    options = {"prompt_lookup_num_tokens": 3, "eos_token_id": 1}  # it cannot come before `new` tokens
    theirs = generate(model, ids, stock(model), new=20, **options)
    cache = tiered(model)
    assert_same(generate(model, ids, cache, new=20, **options), theirs)
    assert cache.get_seq_length() == ids.shape[1] + 19
